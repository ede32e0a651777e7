# race corpus
# rule = "The driver itself keeps the old and the new owner of reused memory apart, not those who never waited"
# source = "Driver API, Stream Ordered Memory Allocator, overview (may insert inter-stream dependencies)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "use", "free"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
first, second, third = (ok(driver.cuStreamCreate(1)) for _ in range(3))
x = ok(driver.cuMemAllocAsync(BYTES, first))
ready = ok(driver.cuEventCreate(2))
ok(driver.cuEventRecord(ready, first))
fill(first, int(x), 1.0)
if sys.argv[1] == "racy":
    ok(driver.cuEventRecord(ready, first))
    ok(driver.cuStreamWaitEvent(third, ready, 0))
    fill(third, int(x), 2.0)  # @use
ok(driver.cuMemFreeAsync(x, first))  # @free
y = ok(driver.cuMemAllocAsync(BYTES, second))  # may well be the same memory
fill(second, int(y), 3.0)
ok(driver.cuMemFreeAsync(y, second))
ok(driver.cuCtxSynchronize())
