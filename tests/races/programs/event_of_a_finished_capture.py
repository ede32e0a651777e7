# race corpus
# rule = "An event recorded anew outside of a capture stands for work again"
# source = "CUDA Programming Guide, CUDA Graphs, Cross-stream Dependencies and Events; Driver API, cuEventRecord"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, z = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
graph, side, event = ct.CUDAGraph(), ct.Stream(), ct.Event()
with ct.graph(graph):
    fill(ct.current_stream(), z)
    event.record()
    side.wait_event(event)
    fill(side, z)
    event.record(side)
    event.wait()
for _ in range(2):
    graph.replay()
    fill(side, x)  # @write
    event.record(side)
    if sys.argv[1] == "fixed":
        event.wait()
    copy(ct.current_stream(), y, x)  # @read
    side.wait_stream(ct.current_stream())
ct.synchronize()
