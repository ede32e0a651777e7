"""What the software device claims to be, and what its operations cost in virtual time.

A device of compute capability 9.0 with the shape of an H100: code that asks for limits gets ones that kernels for that
generation fit in. Costs are a simple model (latency plus bytes over bandwidth) so that timelines have a GPU's
proportions; they do not predict any GPU's speed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "ARCH",
    "ATTRIBUTES",
    "COMPUTE_CAPABILITY",
    "DRIVER_VERSION",
    "MAX_GRID",
    "MAX_SHARED",
    "MAX_SHARED_OPTIN",
    "NAME",
    "ThreadWork",
    "copy_cost",
    "kernel_cost",
    "memset_cost",
]

NAME: Final = "cudatool software device"
COMPUTE_CAPABILITY: Final = (9, 0)
ARCH: Final = 10 * COMPUTE_CAPABILITY[0] + COMPUTE_CAPABILITY[1]
"""The compute capability as PTX and fatbins spell it: 90."""
DRIVER_VERSION: Final = 13_050
"""Not older than the bindings we support, else cuda.core warns."""
MAX_GRID: Final = (2**31 - 1, 65535, 65535)
MAX_SHARED: Final = 48 << 10
MAX_SHARED_OPTIN: Final = 227 << 10

ATTRIBUTES: Final[dict[int, int]] = {
    # CUdevice_attribute -> value; what is not here is 0 ("not supported").
    1: 1024,  # MAX_THREADS_PER_BLOCK
    2: 1024,  # MAX_BLOCK_DIM_X
    3: 1024,  # MAX_BLOCK_DIM_Y
    4: 64,  # MAX_BLOCK_DIM_Z
    5: MAX_GRID[0],  # MAX_GRID_DIM_X
    6: MAX_GRID[1],  # MAX_GRID_DIM_Y
    7: MAX_GRID[2],  # MAX_GRID_DIM_Z
    8: MAX_SHARED,  # MAX_SHARED_MEMORY_PER_BLOCK
    9: 64 << 10,  # TOTAL_CONSTANT_MEMORY
    10: 32,  # WARP_SIZE
    11: 2**31 - 1,  # MAX_PITCH
    12: 65536,  # MAX_REGISTERS_PER_BLOCK
    13: 1_980_000,  # CLOCK_RATE, kHz
    14: 512,  # TEXTURE_ALIGNMENT
    15: 1,  # GPU_OVERLAP
    16: 132,  # MULTIPROCESSOR_COUNT
    19: 1,  # CAN_MAP_HOST_MEMORY
    30: 512,  # SURFACE_ALIGNMENT
    31: 1,  # CONCURRENT_KERNELS
    33: 1,  # PCI_BUS_ID (the device's ordinal is added)
    36: 2_619_000,  # MEMORY_CLOCK_RATE, kHz
    37: 5120,  # GLOBAL_MEMORY_BUS_WIDTH, bits
    38: 50 << 20,  # L2_CACHE_SIZE
    39: 2048,  # MAX_THREADS_PER_MULTIPROCESSOR
    40: 3,  # ASYNC_ENGINE_COUNT
    41: 1,  # UNIFIED_ADDRESSING
    51: 32,  # TEXTURE_PITCH_ALIGNMENT
    69: 1 << 28,  # MAXIMUM_TEXTURE1D_LINEAR_WIDTH
    70: 131_072,  # MAXIMUM_TEXTURE2D_LINEAR_WIDTH
    71: 65_000,  # MAXIMUM_TEXTURE2D_LINEAR_HEIGHT
    72: 2_097_120,  # MAXIMUM_TEXTURE2D_LINEAR_PITCH, bytes
    75: COMPUTE_CAPABILITY[0],
    76: COMPUTE_CAPABILITY[1],
    78: 1,  # STREAM_PRIORITIES_SUPPORTED
    79: 1,  # GLOBAL_L1_CACHE_SUPPORTED
    80: 1,  # LOCAL_L1_CACHE_SUPPORTED
    81: 228 << 10,  # MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    82: 65536,  # MAX_REGISTERS_PER_MULTIPROCESSOR
    83: 1,  # MANAGED_MEMORY
    87: 2,  # SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO
    89: 1,  # CONCURRENT_MANAGED_ACCESS
    90: 1,  # COMPUTE_PREEMPTION_SUPPORTED
    91: 1,  # CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    95: 1,  # COOPERATIVE_LAUNCH
    97: MAX_SHARED_OPTIN,  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    99: 1,  # HOST_REGISTER_SUPPORTED
    102: 1,  # VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    103: 1,  # HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    106: 32,  # MAX_BLOCKS_PER_MULTIPROCESSOR
    111: 1024,  # RESERVED_SHARED_MEMORY_PER_BLOCK
    113: 1,  # READ_ONLY_HOST_REGISTER_SUPPORTED
    115: 1,  # MEMORY_POOLS_SUPPORTED
    119: 1,  # MEMPOOL_SUPPORTED_HANDLE_TYPES: file descriptors
    122: 1,  # CAN_USE_64_BIT_STREAM_MEM_OPS
    123: 1,  # CAN_USE_STREAM_WAIT_VALUE_NOR
    129: 1,  # UNIFIED_FUNCTION_POINTERS
    134: 0,  # HOST_NUMA_ID
    142: 1,  # HOST_NUMA_MEMORY_POOLS_SUPPORTED
    144: 1,  # HOST_MEMORY_POOLS_SUPPORTED
}

_COPY_LATENCY_NS: Final = 1_500
_KERNEL_LATENCY_NS: Final = 2_500
_LINK_BYTES_PER_NS: Final = 25  # host link, one direction
_MEMORY_BYTES_PER_NS: Final = 2_000
_INSTRUCTIONS_PER_NS: Final = 30_000  # of all threads on the whole device


def copy_cost(size: int, *, on_device: bool) -> int:
    """Return the virtual ns that a copy of `size` bytes takes, over the host link or inside the device."""
    return _COPY_LATENCY_NS + (2 * size // _MEMORY_BYTES_PER_NS if on_device else size // _LINK_BYTES_PER_NS)


def memset_cost(size: int) -> int:
    """Return the virtual ns that setting `size` bytes takes."""
    return _COPY_LATENCY_NS + size // _MEMORY_BYTES_PER_NS


class ThreadWork(NamedTuple):
    """What a thread of a kernel is taken to do: instructions executed, bytes moved, ns slept."""

    instructions: int
    moved: int
    slept: int


def kernel_cost(threads: int, work: ThreadWork) -> int:
    """Return the virtual ns of a kernel of `threads` threads that do so much each. All of them sleep at a time."""
    busy = max(threads * work.instructions / _INSTRUCTIONS_PER_NS, threads * work.moved / _MEMORY_BYTES_PER_NS)
    return _KERNEL_LATENCY_NS + int(busy) + work.slept
