# race corpus
# rule = "A free on another stream than the allocation's comes behind all uses, on the allocating stream too"
# source = "Driver API, Stream Ordered Memory Allocator, cuMemFreeAsync"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["use-after-free", "use", "free"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
one, two = (ok(driver.cuStreamCreate(1)) for _ in range(2))
ready, done = (ok(driver.cuEventCreate(2)) for _ in range(2))
for _ in range(3):
    x = ok(driver.cuMemAllocAsync(BYTES, one))
    ok(driver.cuEventRecord(ready, one))
    ok(driver.cuStreamWaitEvent(two, ready, 0))
    fill(one, int(x))  # @use
    ok(driver.cuEventRecord(done, one))
    if sys.argv[1] == "fixed":
        ok(driver.cuStreamWaitEvent(two, done, 0))
    ok(driver.cuMemFreeAsync(x, two))  # @free
    ok(driver.cuStreamSynchronize(one))
ok(driver.cuCtxSynchronize())
