# race corpus
# rule = "A synchronous copy runs in the legacy default stream and does not wait for non-blocking streams"
# source = "Driver API, 3. Stream synchronization behavior, Legacy default stream"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, fill, ok

Device().set_current()
x = int(ok(driver.cuMemAlloc(BYTES)))
stream = ok(driver.cuStreamCreate(1))
target = np.empty(N, np.float32)
fill(stream, x)  # @write
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
ok(driver.cuMemcpyDtoH(target.ctypes.data, x, BYTES))  # @read
ok(driver.cuCtxSynchronize())
