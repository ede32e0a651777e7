# race corpus
# rule = "Host and kernels may read managed memory at the same time; one that updates it needs an order with the host"
# source = "CUDA Programming Guide, Unified Memory, Coherency and Concurrency"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "update", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, add_one, array_at, copy, ok

import cudatool as ct

Device().set_current()
address = int(ok(driver.cuMemAllocManaged(BYTES, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
result, stream = int(ok(driver.cuMemAlloc(BYTES))), ok(driver.cuStreamCreate(1))
view = ct.host_view(array_at(address))
view[:] = 1.0
copy(stream, result, address)
if sys.argv[1] == "racy":
    add_one(stream, address)  # @update
else:
    add_one(stream, address, N // 2)
float(view[N - 1])  # @read
ok(driver.cuCtxSynchronize())
