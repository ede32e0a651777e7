"""Driver entry points: unified addressing, that is, what the driver knows of an address.

Grouped as in the CUDA driver API reference.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint, c_uint64

from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.arena import READ_WRITE
from cudatool.sim.machine import Context, current_context
from cudatool.sim.results import DriverError, Result

_TYPES = {
    # CUpointer_attribute -> C type of its value
    1: c_size_t,  # CONTEXT
    2: c_uint,  # MEMORY_TYPE
    3: c_uint64,  # DEVICE_POINTER
    4: c_size_t,  # HOST_POINTER
    6: ctypes.c_uint,  # SYNC_MEMOPS
    7: c_uint64,  # BUFFER_ID
    8: c_uint,  # IS_MANAGED
    9: c_int,  # DEVICE_ORDINAL
    10: c_uint,  # IS_LEGACY_CUDA_IPC_CAPABLE
    11: c_uint64,  # RANGE_START_ADDR
    12: c_size_t,  # RANGE_SIZE
    13: c_uint,  # MAPPED
    14: c_uint64,  # ALLOWED_HANDLE_TYPES
    15: c_uint,  # IS_GPU_DIRECT_RDMA_CAPABLE
    16: c_uint,  # ACCESS_FLAGS
    17: c_size_t,  # MEMPOOL_HANDLE
}


def _pointer_attribute(attribute: int, address: int) -> int | None:
    """Return the value of an attribute of the allocation that holds `address`, None if no allocation does."""
    virtual = state.machine.virtual
    mapping = virtual.mapping_at(address)
    found = mapping or state.machine.allocations.holding(address)
    if found is None:  # an H200's driver answers so for a reserved range without memory, too
        return None
    # "not necessarily the mapped region, but the mappable address range" (CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
    within = virtual.reservation_at(address) or found
    on_host = found.device < 0
    slot = state.machine.graph_memory.at(found.address)
    is_managed = found.kind == "managed" or (slot is not None and slot.is_managed)
    context = state.machine.objects.get(found.context)
    ordinal = found.device if not on_host else context.device.ordinal if isinstance(context, Context) else 0
    values = {
        1: found.context,
        2: 1 if on_host else 2,  # CU_MEMORYTYPE_HOST, _DEVICE
        3: address,
        4: address if on_host or is_managed else None,
        7: found.serial,
        8: int(is_managed),
        9: ordinal,
        10: int(found.kind == "device"),
        11: within.address,
        12: within.size,
        13: 1,
        14: mapping.physical.handle_types if mapping else 0,
        16: mapping.flags if mapping else READ_WRITE,
        17: found.pool,
    }
    return values.get(attribute, 0)


@entry("cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)")
def cuPointerGetAttribute(data: int, attribute: int, ptr: int) -> None:
    current_context()
    if attribute not in _TYPES:
        raise DriverError(Result.INVALID_VALUE)
    value = _pointer_attribute(attribute, ptr)
    if value is None:
        raise DriverError(Result.INVALID_VALUE)
    write(data, _TYPES[attribute], value)


@entry(
    "cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)"
)
def cuPointerGetAttributes(numAttributes: int, attributes: int, data: int, ptr: int) -> None:
    # A pointer that CUDA does not know is not an error here: zeros, and ordinal -2 (cuPointerGetAttributes).
    if not attributes or not data:
        raise DriverError(Result.INVALID_VALUE)
    kinds = (c_int * numAttributes).from_address(attributes)
    targets = (c_size_t * numAttributes).from_address(data)
    for kind, target in zip(kinds, targets, strict=True):
        if kind not in _TYPES:
            raise DriverError(Result.INVALID_VALUE)
        value = _pointer_attribute(kind, ptr)
        write(target, _TYPES[kind], value if value is not None else -2 if kind == 9 else 0)


@entry("cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)")
def cuPointerSetAttribute(value: int, attribute: int, ptr: int) -> None:
    current_context()
    if attribute != 6 or state.machine.allocations.holding(ptr) is None:  # only SYNC_MEMOPS can be set
        raise DriverError(Result.INVALID_VALUE)
