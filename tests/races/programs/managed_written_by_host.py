# race corpus
# rule = "A launch sees what the host wrote to managed memory before it, and must be complete before the next write"
# source = "CUDA Programming Guide, Unified Memory, Coherency and Concurrency"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "use", "write"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, array_at, copy, ok

import cudatool as ct

Device().set_current()
address = int(ok(driver.cuMemAllocManaged(BYTES, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
result = int(ok(driver.cuMemAlloc(BYTES)))
stream = ok(driver.cuStreamCreate(1))
view = ct.host_view(array_at(address))
view[:] = 1.0
copy(stream, result, address)  # @use
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
view[:] = 2.0  # @write
ok(driver.cuCtxSynchronize())
