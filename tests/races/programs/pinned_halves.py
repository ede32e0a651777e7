# race corpus
# rule = "Host and device may work on different bytes of one pinned buffer"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-host", "copy", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, stream, pinned = ct.zeros(N // 2), ct.Stream(), ct.empty_pinned(N)
ct.synchronize()
pinned[:] = 1.0
with ct.stream(stream):
    x.copy_(pinned[: N // 2], non_blocking=True)  # @copy
first = N // 2 if sys.argv[1] == "fixed" else N // 2 - 1
ct.host_view(pinned)[first:] = 2.0  # @write
stream.synchronize()
