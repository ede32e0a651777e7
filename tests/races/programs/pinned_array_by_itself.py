# race corpus
# rule = "What the host does with cudatool's own pinned arrays is seen without a word of the program"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-host", "copy", "read"], ["race-host", "load", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, y, stream = ct.ones(N), ct.zeros(N), ct.Stream()
result, source = ct.empty_pinned(N), ct.empty_pinned(N)
ct.synchronize()
source[:] = 1.0
with ct.stream(stream):
    x.get(result, blocking=False)  # @copy
    y.copy_(source, non_blocking=True)  # @load
if sys.argv[1] == "fixed":
    stream.synchronize()
float(result.sum())  # @read
source *= 2.0  # @write
