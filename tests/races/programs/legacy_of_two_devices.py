# race corpus
# rule = "The legacy default stream synchronizes with streams of its own context, not of another device's"
# source = "Driver API, 3. Stream synchronization behavior, Legacy default stream (in the same CUcontext)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import BYTES, N, fill, ok

import cudatool as ct

x, y = ct.zeros(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
fill(ct.default_stream(0), x)  # @write
if sys.argv[1] == "fixed":
    ct.default_stream(1).wait_stream(ct.default_stream(0))
with ct.device(1):
    ok(driver.cuMemcpyDtoDAsync(y.data_ptr(), x.data_ptr(), BYTES, 0))  # @read
ct.synchronize(0), ct.synchronize(1)
