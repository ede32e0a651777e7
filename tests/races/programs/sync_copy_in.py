# race corpus
# rule = "A synchronous copy from pageable memory may return when it is staged; one from pinned memory when it is done"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Synchronous (DMA may not have completed)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "copy", "read"]]
# pinned = []
# blocking = []
# ---
import sys

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, array_at, copy, ok

Device().set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream = ok(driver.cuStreamCreate(0 if sys.argv[1] == "blocking" else 1))
source = array_at(ok(driver.cuMemAllocHost(BYTES))) if sys.argv[1] == "pinned" else np.empty(N, np.float32)
source[:] = 1.0
ok(driver.cuMemcpyHtoD(x, source.ctypes.data, BYTES))  # @copy
copy(stream, y, x)  # @read
ok(driver.cuCtxSynchronize())
