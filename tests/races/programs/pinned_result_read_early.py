# race corpus
# rule = "An asynchronous copy to pinned memory is there after a synchronization, not before"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, stream, pinned = ct.ones(N), ct.Stream(), ct.empty_pinned(N)
ct.synchronize()
with ct.stream(stream):
    x.get(pinned, blocking=False)  # @copy
if sys.argv[1] == "fixed":
    stream.synchronize()
float(ct.host_view(pinned)[0])  # @read
