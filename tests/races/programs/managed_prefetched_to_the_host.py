# race corpus
# rule = "A prefetch to the host is work on its stream: it waits for the stream's kernels, and the host does not for it"
# source = "Driver API, Unified Addressing, cuMemPrefetchAsync"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "write", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, array_at, fill, ok

import cudatool as ct

Device().set_current()
address = int(ok(driver.cuMemAllocManaged(BYTES, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
view = ct.host_view(array_at(address))
view[:] = 0.0
stream, host, device = ok(driver.cuStreamCreate(1)), driver.CUmemLocation(), driver.CUmemLocation()
host.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
device.type, device.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
ok(driver.cuMemPrefetchAsync(address, BYTES, device, 0, stream))
fill(stream, address)  # @write
ok(driver.cuMemPrefetchAsync(address, BYTES, host, 0, stream))
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
float(view[0])  # @read
ok(driver.cuCtxSynchronize())
ok(driver.cuMemFree(address))
