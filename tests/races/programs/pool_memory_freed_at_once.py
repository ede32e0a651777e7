# race corpus
# rule = "cuMemFree of stream-ordered memory does not wait for its users"
# source = "Driver API, Memory Management, cuMemFree"
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
x = ok(driver.cuMemAllocAsync(BYTES, one))
ok(driver.cuStreamSynchronize(one))
fill(two, int(x))  # @use
ok(driver.cuStreamSynchronize(two if sys.argv[1] == "fixed" else one))
ok(driver.cuMemFree(x))  # @free
ok(driver.cuCtxSynchronize())
