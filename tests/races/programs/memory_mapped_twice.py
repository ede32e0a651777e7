# race corpus
# rule = "Accesses through two mappings of one handle are accesses of the same memory"
# source = "Driver API, Virtual Memory Management, cuMemMap; CUDA Programming Guide, Virtual Aliasing Support"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "first", "second"]]
# other_bytes = []
# other_memory = []
# fixed = []
# mapped_again = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import ok

Device().set_current()
SIZE = 2 << 20
variant = sys.argv[1]
properties = driver.CUmemAllocationProp()
properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type, properties.location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
access = driver.CUmemAccessDesc()
access.location, access.flags = properties.location, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def mapped(handle):
    """Return the address of a new mapping."""
    address = ok(driver.cuMemAddressReserve(SIZE, 0, driver.CUdeviceptr(0), 0))
    ok(driver.cuMemMap(address, SIZE, 0, handle, 0))
    ok(driver.cuMemSetAccess(address, SIZE, [access], 1))
    return int(address)


handle = ok(driver.cuMemCreate(SIZE, properties, 0))
other = ok(driver.cuMemCreate(SIZE, properties, 0))
x = mapped(handle)
y = mapped(other if variant == "other_memory" else handle)
one, two = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
ok(driver.cuMemsetD8Async(x, 1, 256, one))  # @first
if variant in ("fixed", "mapped_again"):
    ok(driver.cuStreamSynchronize(one))
if variant == "mapped_again":
    ok(driver.cuMemUnmap(y, SIZE))
    ok(driver.cuMemMap(y, SIZE, 0, other, 0))
    ok(driver.cuMemSetAccess(y, SIZE, [access], 1))
    ok(driver.cuMemsetD8Async(x, 1, 256, one))
ok(driver.cuMemsetD8Async(y + (256 if variant == "other_bytes" else 0), 2, 256, two))  # @second
ok(driver.cuCtxSynchronize())
