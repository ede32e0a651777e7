# race corpus
# rule = "A prefetch moves pages and changes no byte: it may run beside readers and writers"
# source = "Driver API, Unified Addressing, cuMemPrefetchAsync"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
x, y = (int(ok(driver.cuMemAllocManaged(BYTES, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL))) for _ in range(2))
one, two, device = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1)), driver.CUmemLocation()
device.type, device.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
fill(one, x)  # @write
ok(driver.cuMemPrefetchAsync(x, BYTES, device, 0, two))
copy(one if sys.argv[1] == "fixed" else two, y, x)  # @read
ok(driver.cuCtxSynchronize())
