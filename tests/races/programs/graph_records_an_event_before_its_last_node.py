# race corpus
# rule = "An external event that a graph records stands for what comes before its node, not for the nodes after it"
# source = "Driver API, Event Management, cuEventRecordWithFlags, CU_EVENT_RECORD_EXTERNAL"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# other-buffer = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, z = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
graph, other, ready = ct.CUDAGraph(), ct.Stream(), ct.Event(external=True)
with ct.graph(graph):
    fill(ct.current_stream(), z)
    if sys.argv[1] == "fixed":
        fill(ct.current_stream(), x)
    ready.record()
    if sys.argv[1] != "fixed":
        fill(ct.current_stream(), x)  # @write
for _ in range(2):
    graph.replay()
    other.wait_event(ready)
    copy(other, y, z if sys.argv[1] == "other-buffer" else x)  # @read
    ct.synchronize()
