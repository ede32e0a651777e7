# race corpus
# rule = "Pinned memory that is dropped while a copy reads it rests until the copy is done, if its allocator knows of it"
# source = "Driver API, Memory Management, cuMemcpyHtoDAsync; Event Management, cuEventQuery"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "copy", "write"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from race_kernels import BYTES, N, ok

import cudatool as ct

x, stream = ct.zeros(N), ct.Stream()
ct.synchronize()
pinned = ct.empty_pinned(N)
pinned[:] = 1.0
if sys.argv[1] == "fixed":
    with ct.stream(stream):
        x.copy_(pinned, non_blocking=True)
else:  # a copy that cudatool's allocator does not hear of
    ok(driver.cuMemcpyHtoDAsync(x.data_ptr(), pinned.ctypes.data, BYTES, stream.cuda_stream))  # @copy
del pinned
other = ct.empty_pinned(N)
ct.host_view(other)[:] = 2.0  # @write
stream.synchronize()
