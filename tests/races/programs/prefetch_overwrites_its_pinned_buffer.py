# race corpus
# rule = "A prefetch that does not block reads its pinned buffer later: the next batch goes to another one, or waits"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-host", "prefetch", "refill"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct
from cudatool import ops

host, x, loader, ready = ct.empty_pinned(N), ct.empty(N), ct.Stream(), ct.Event()
ct.synchronize()
for i in range(3):
    if sys.argv[1] == "fixed" and i:
        ready.synchronize()
    ct.host_view(host)[:] = i  # @refill
    loader.wait_stream(ct.current_stream())
    with ct.stream(loader):
        x.copy_(host, non_blocking=True)  # @prefetch
        ready.record()
    ct.current_stream().wait_event(ready)
    y = ops.sum(x)
ct.synchronize()
