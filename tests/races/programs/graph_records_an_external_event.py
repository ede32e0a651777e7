# race corpus
# rule = "An external event that a graph records stands, after the launch, for the place of its node in that launch"
# source = "Driver API, Event Management, cuEventRecordWithFlags, CU_EVENT_RECORD_EXTERNAL"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
graph, other, ready = ct.CUDAGraph(), ct.Stream(), ct.Event(external=True)
with ct.graph(graph):
    fill(ct.current_stream(), x)  # @write
    ready.record()
if sys.argv[1] == "racy":
    other.wait_event(ready)
graph.replay()
if sys.argv[1] == "fixed":
    other.wait_event(ready)
copy(other, y, x)  # @read
ct.synchronize()
