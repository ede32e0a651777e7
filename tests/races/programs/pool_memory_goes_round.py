# race corpus
# rule = "The pool orders the next owner behind the free; who uses memory beside its owner's stream comes before the free"
# source = "Driver API, Stream Ordered Memory Allocator, cuMemAllocAsync, cuMemFreeAsync"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["use-after-free", "read", "free"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
streams = [ok(driver.cuStreamCreate(1)) for _ in range(3)]
result, ready = int(ok(driver.cuMemAlloc(BYTES))), ok(driver.cuEventCreate(2))
for turn in range(6):
    owner, reader = streams[turn % 2], streams[2]
    x = ok(driver.cuMemAllocAsync(BYTES, owner))
    fill(owner, int(x))
    ok(driver.cuEventRecord(ready, owner))
    ok(driver.cuStreamWaitEvent(reader, ready, 0))
    copy(reader, result, int(x))  # @read
    if sys.argv[1] == "fixed":
        ok(driver.cuEventRecord(ready, reader))
        ok(driver.cuStreamWaitEvent(owner, ready, 0))
    ok(driver.cuMemFreeAsync(x, owner))  # @free
ok(driver.cuCtxSynchronize())
