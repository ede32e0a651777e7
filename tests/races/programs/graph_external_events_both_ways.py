# race corpus
# rule = "External events order a graph's input and its output with another stream, launch by launch"
# source = "Driver API, Event Management, cuEventRecordWithFlags; Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-war", "node", "load"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
graph, loader = ct.CUDAGraph(), ct.Stream()
full, empty = ct.Event(external=True), ct.Event(external=True)
full.record(loader)
with ct.graph(graph):
    full.wait()
    copy(ct.current_stream(), y, x)  # @node
    empty.record()
for step in range(4):
    if step and sys.argv[1] == "fixed":
        loader.wait_event(empty)
    fill(loader, x, float(step))  # @load
    full.record(loader)
    graph.replay()
ct.synchronize()
