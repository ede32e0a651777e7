# race corpus
# rule = "Copies on several streams and the host may read one pinned buffer; the host writes it behind all of them"
# source = "API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-host", "second", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

pinned, arrays, streams = ct.empty_pinned(N), [ct.zeros(N) for _ in range(2)], [ct.Stream() for _ in range(2)]
pinned[:] = 1.0
ct.synchronize()
with ct.stream(streams[0]):
    arrays[0].copy_(pinned, non_blocking=True)
with ct.stream(streams[1]):
    arrays[1].copy_(pinned, non_blocking=True)  # @second
total = pinned.sum()
for stream in streams if sys.argv[1] == "fixed" else streams[:1]:
    stream.synchronize()
pinned[N // 2] = total  # @write
ct.synchronize()
