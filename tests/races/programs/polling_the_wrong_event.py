# race corpus
# rule = "An event that has completed says nothing of what was enqueued behind its record"
# source = "Driver API, Event Management, cuEventQuery"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x, pinned, stream = ct.zeros(N), ct.empty_pinned(N), ct.Stream()
ct.synchronize()
fill(stream, x)
filled = stream.record_event()
with ct.stream(stream):
    x.get(pinned, blocking=False)  # @copy
copied = stream.record_event()
while not (copied if sys.argv[1] == "fixed" else filled).query():
    pass
float(pinned[0])  # @read
ct.synchronize()
