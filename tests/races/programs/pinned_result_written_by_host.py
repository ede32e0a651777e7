# race corpus
# rule = "The host must not write where an asynchronous copy is still to write"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-host", "copy", "write"]]
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
    ct.synchronize()
ct.host_view(pinned)[:] = 0.0  # @write
