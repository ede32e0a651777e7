# race corpus
# rule = "cuMemFree waits for work that uses the memory; what is enqueued afterwards must not use it"
# source = "CUDA Programming Guide, Stream-Ordered Memory Allocator, Introduction (cudaFree synchronizes)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["use-after-free", "free", "late-use"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
stream = ok(driver.cuStreamCreate(1))
x = ok(driver.cuMemAlloc(BYTES))
fill(stream, int(x))
ok(driver.cuMemFree(x))  # @free
if sys.argv[1] == "racy":
    fill(stream, int(x))  # @late-use
driver.cuCtxSynchronize()
