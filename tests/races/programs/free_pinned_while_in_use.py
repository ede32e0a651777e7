# race corpus
# rule = "Pinned memory is unpinned only after the copies that use it"
# source = "Driver API, Memory Management, cuMemFreeHost, cuMemHostUnregister"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["use-after-free", "copy", "free"]]
# fixed = []
# ---
import sys

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, ok

Device().set_current()
stream, x = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(BYTES))
memory = np.ones(N, np.float32)
ok(driver.cuMemHostRegister(memory.ctypes.data, BYTES, 0))
ok(driver.cuMemcpyHtoDAsync(x, memory.ctypes.data, BYTES, stream))  # @copy
if sys.argv[1] == "fixed":
    ok(driver.cuStreamSynchronize(stream))
ok(driver.cuMemHostUnregister(memory.ctypes.data))  # @free
ok(driver.cuCtxSynchronize())
ok(driver.cuMemFree(x))
