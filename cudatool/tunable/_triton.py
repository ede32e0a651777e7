"""Products by a Triton kernel, where Triton is installed.

Triton is a compiler here and nothing else: what it makes is loaded and launched as any kernel is, so that neither its
driver nor PyTorch is needed, and the trace has it.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool import _driver
from cudatool.blas._gemm import BFLOAT16, Compute, Gemm
from cudatool.runtime import calls
from cudatool.runtime.calls import operation
from cudatool.runtime.device import device as on_device
from cudatool.runtime.device import get_device_capability
from cudatool.runtime.kernel import Kernel, launch
from cudatool.runtime.stream import Stream

__all__ = ["TILES", "Tile", "fits", "multiply"]


class Tile(NamedTuple):
    """What one block computes, and with how many warps; `stages` loads are in progress at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES: Final = {
    # by the candidate's name
    "Triton_32x32": Tile(32, 32, 32, 4, 3),
    "Triton_64x64": Tile(64, 64, 32, 4, 3),
    "Triton_128x128": Tile(128, 128, 32, 8, 3),
}
_TYPES: Final = {np.dtype(np.float16): "fp16", BFLOAT16: "bf16", np.dtype(np.float32): "fp32"}
_PRECISIONS: Final = {Compute.SINGLE: "ieee", Compute.TF32: "tf32"}
_ALIGNMENT: Final = 16  # bytes of an address, and what numbers are multiples of, that Triton knows
_MOST_BLOCKS: Final = 65535  # along y and z
_WARP: Final = 32


def fits(gemm: Gemm) -> bool:
    """Return whether the kernel can compute a product here."""
    product = gemm.product
    return (
        gemm.a.dtype in _TYPES
        and gemm.out.dtype == gemm.a.dtype
        and gemm.compute in _PRECISIONS
        and not gemm.beta
        and not product.wide
        and product.batch <= _MOST_BLOCKS
        and -(-gemm.out.shape[-1] // 32) <= _MOST_BLOCKS
        and find_spec("triton") is not None
    )


def multiply(tile: Tile, gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product."""
    arrays = (gemm.a, gemm.b, gemm.out)
    itemsize = gemm.a.dtype.itemsize
    steps = [stride // itemsize for array in arrays for stride in array.strides[-2:]]
    batches = [array.strides[0] // itemsize if array.ndim == 3 else 0 for array in arrays]
    rows, columns = gemm.out.shape[-2:]
    numbers = (rows, columns, gemm.a.shape[-1], *steps, *batches)
    addresses = [array.data_ptr() for array in arrays]
    kernel, shared, used = _compiled(
        tile,
        _TYPES[gemm.a.dtype],
        _PRECISIONS[gemm.compute],
        tuple(number == 1 for number in numbers),
        tuple(value % _ALIGNMENT == 0 for value in (*addresses, *numbers)),
        stream.device_index,
    )
    grid = (-(-rows // tile.rows), -(-columns // tile.columns), gemm.product.batch)
    config = calls.core.LaunchConfig(grid=grid, block=tile.warps * _WARP, shmem_size=shared)
    taken = [number for number, is_taken in zip(numbers, used, strict=True) if is_taken]
    # After its own parameters Triton adds addresses of scratch memory, which this kernel does not use.
    extra = [0] * (len(kernel.parameters) - len(arrays) - len(taken) - 1)
    launch(stream, config, kernel, *arrays, *taken, np.float32(gemm.alpha.real), *extra)


@functools.cache
def _compiled(
    tile: Tile, dtype: str, precision: str, ones: tuple[bool, ...], aligned: tuple[bool, ...], device: int
) -> tuple[Kernel, int, tuple[bool, ...]]:
    """Return the kernel for numbers of which some are 1 or multiples of 16; its shared memory; which it is passed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cudatool.tunable._triton_kernel import gemm  # imports Triton, which may not be there

    names: list[str] = gemm.arg_names
    signature = dict.fromkeys(names[:3], f"*{dtype}")
    constants: dict[tuple[int], Any] = {}
    for index, one in enumerate(ones, 3):
        signature[names[index]] = "constexpr" if one else "i32"
        if one:
            constants[index,] = 1
    signature[names[3 + len(ones)]] = "fp32"
    for index, value in enumerate((tile.rows, tile.columns, tile.depth, precision), 4 + len(ones)):
        signature[names[index]] = "constexpr"
        constants[index,] = value
    attributes = {
        (index,): [["tt.divisibility", _ALIGNMENT]]
        for index, is_multiple in enumerate(aligned)
        if is_multiple and (index,) not in constants
    }
    simulated = _driver.initialize().kind == "sim"
    if simulated:  # what it runs, which is less than its compute capability says
        target = triton.runtime.driver.active.get_current_target()
    else:  # without Triton's own driver, which asks PyTorch
        major, minor = get_device_capability(device)
        target = GPUTarget("cuda", 10 * major + minor, _WARP)
    made = triton.compile(
        ASTSource(gemm, signature, constants, attributes),
        target=target,
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    name, shared, ptx = made.metadata.name, int(made.metadata.shared), made.asm["ptx"].encode()
    with on_device(device), operation():
        core = calls.core.ObjectCode
        code = core.from_ptx(ptx) if simulated else core.from_cubin(made.asm["cubin"])
        kernel = Kernel(code.get_kernel(name), name, lambda: (ptx, name))
        kernel.set_shared_memory_config(shared)
    return kernel, shared, tuple(not one for one in ones)
