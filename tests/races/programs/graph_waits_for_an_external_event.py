# race corpus
# rule = "An external wait in a graph is for the event's latest record at the launch"
# source = "Driver API, Stream Management, cuStreamWaitEvent, CU_EVENT_WAIT_EXTERNAL"
# [expect]
# racy = [["race-raw", "write", "node"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
graph, other, ready = ct.CUDAGraph(), ct.Stream(), ct.Event(external=True)
ready.record(other)
with ct.graph(graph):
    ready.wait()
    copy(ct.current_stream(), y, x)  # @node
for _ in range(2):
    fill(other, x)  # @write
    if sys.argv[1] == "fixed":
        ready.record(other)
    graph.replay()
    other.wait_stream(ct.current_stream())
ct.synchronize()
