# race corpus
# rule = "A memset of pinned host memory is synchronous for the host; its Async form is not"
# source = "Driver API, 2. API synchronization behavior, Memset (except when the target is pinned host memory)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "memset", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, array_at, ok

import cudatool as ct

Device().set_current()
address = ok(driver.cuMemAllocHost(BYTES))
stream = ok(driver.cuStreamCreate(1))
if sys.argv[1] == "fixed":
    ok(driver.cuMemsetD32(address, 7, N))
else:
    ok(driver.cuMemsetD32Async(address, 7, N, stream))  # @memset
float(ct.host_view(array_at(address))[0])  # @read
ok(driver.cuCtxSynchronize())
