# race corpus
# rule = "An event recorded behind a copy, once synchronized, makes its pinned source free to be written"
# source = "Driver API, Event Management, cuEventSynchronize"
# [expect]
# racy = [["race-host", "copy", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, stream, pinned = ct.zeros(N), ct.Stream(), ct.empty_pinned(N)
ct.synchronize()
pinned[:] = 1.0
early = stream.record_event()
with ct.stream(stream):
    x.copy_(pinned, non_blocking=True)  # @copy
late = stream.record_event()
(late if sys.argv[1] == "fixed" else early).synchronize()
ct.host_view(pinned)[:] = 2.0  # @write
