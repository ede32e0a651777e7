# race corpus
# rule = "A memset of device memory is asynchronous for the host, also without Async in its name"
# source = "Driver API, 2. API synchronization behavior, Memset"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "memset", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, copy, ok

Device().set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream = ok(driver.cuStreamCreate(0 if sys.argv[1] == "fixed" else 1))
ok(driver.cuMemsetD32(x, 0, N))  # @memset
copy(stream, y, x)  # @read
ok(driver.cuCtxSynchronize())
