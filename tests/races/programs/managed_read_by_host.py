# race corpus
# rule = "The host may use managed memory once the work that uses it is complete"
# source = "CUDA Programming Guide, Unified Memory, Coherency and Concurrency"
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
stream = ok(driver.cuStreamCreate(1))
fill(stream, address)  # @write
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
float(ct.host_view(array_at(address))[0])  # @read
ok(driver.cuCtxSynchronize())
ok(driver.cuMemFree(address))
