# race corpus
# rule = "The default stream, and a wait for a context, are of one context: work in another context comes in no order"
# source = "Driver API, Stream synchronization behavior, Legacy default stream; Context Management, cuCtxSynchronize"
# cuda = "contexts are not told apart on a GPU"
# [expect]
# racy = [["race-raw", "fill", "copy"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, ok

Device().set_current()
first = ok(driver.cuCtxGetCurrent())
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
ok(driver.cuMemsetD8Async(x, 1, BYTES, 0))  # @fill
second = ok(driver.cuCtxCreate(None, 0, 0))
ok(driver.cuCtxSynchronize_v2(first if sys.argv[1] == "fixed" else second))
ok(driver.cuMemcpyDtoDAsync(y, x, BYTES, 0))  # @copy
ok(driver.cuCtxDestroy(second))
ok(driver.cuCtxSynchronize())
