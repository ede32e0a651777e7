# race corpus
# rule = "Work behind the free, in stream order, must not touch the memory"
# source = "Driver API, Stream Ordered Memory Allocator, cuMemFreeAsync (must not be accessed after)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "free", "use"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
stream = ok(driver.cuStreamCreate(1))
x = ok(driver.cuMemAllocAsync(BYTES, stream))
if sys.argv[1] == "fixed":
    fill(stream, int(x))
ok(driver.cuMemFreeAsync(x, stream))  # @free
if sys.argv[1] == "racy":
    fill(stream, int(x))  # @use
driver.cuStreamSynchronize(stream)
