# race corpus
# rule = "A synchronous copy to the host returns when it is complete, and it came after the blocking streams' work"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Synchronous; 3. Legacy default stream"
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
ok(driver.cuMemsetD32(z, 0, N))
ok(driver.cuCtxSynchronize())
producer = ok(driver.cuStreamCreate(0 if sys.argv[1] == "fixed" else 1))
consumer = ok(driver.cuStreamCreate(1))
fill(producer, x)  # @write
target = np.empty(N, np.float32)
ok(driver.cuMemcpyDtoH(target.ctypes.data, z, BYTES))
copy(consumer, y, x)  # @read
ok(driver.cuCtxSynchronize())
