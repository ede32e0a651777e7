# race corpus
# rule = "A synchronous copy from pageable memory waits for its stream first, and so for the blocking streams"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Synchronous (a stream sync is performed)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, copy, fill, ok

Device().set_current()
x, y, z = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(3))
producer = ok(driver.cuStreamCreate(0 if sys.argv[1] == "fixed" else 1))
consumer = ok(driver.cuStreamCreate(1))
source = np.ones(N, np.float32)
fill(producer, x)  # @write
ok(driver.cuMemcpyHtoD(z, source.ctypes.data, BYTES))
copy(consumer, y, x)  # @read
ok(driver.cuCtxSynchronize())
