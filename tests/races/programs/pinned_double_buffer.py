# race corpus
# rule = "Of two pinned buffers each is filled again when its own copy is done"
# source = "Driver API, Event Management, cuEventSynchronize; API synchronization behavior, Memcpy"
# [expect]
# racy = [["race-host", "upload", "refill"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one

import cudatool as ct

pinned, x = [ct.empty_pinned(N) for _ in range(2)], ct.zeros(N)
copied = [ct.Event() for _ in range(2)]
ct.synchronize()
for batch in range(6):
    slot = batch % 2
    if batch >= 2 and sys.argv[1] == "fixed":
        copied[slot].synchronize()
    pinned[slot][:] = batch  # @refill
    x.copy_(pinned[slot], non_blocking=True)  # @upload
    add_one(ct.current_stream(), x)
    if sys.argv[1] == "racy" and batch % 2:
        copied[0].synchronize()  # of the other buffer
    copied[slot].record()
ct.synchronize()
