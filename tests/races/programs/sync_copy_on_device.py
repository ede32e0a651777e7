# race corpus
# rule = "A copy within device memory does not wait for its end, also in its synchronous form"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Synchronous (no host-side synchronization)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "copy", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, N, copy, ok

Device().set_current()
x, y, z = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(3))
ok(driver.cuMemsetD32(x, 0, N))
ok(driver.cuCtxSynchronize())
stream = ok(driver.cuStreamCreate(1))
ok(driver.cuMemcpyDtoD(y, x, BYTES))  # @copy
if sys.argv[1] == "fixed":
    ok(driver.cuCtxSynchronize())
copy(stream, z, y)  # @read
ok(driver.cuCtxSynchronize())
