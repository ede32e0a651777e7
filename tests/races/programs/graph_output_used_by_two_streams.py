# race corpus
# rule = "Two streams may read a graph's output at once; the next launch overwrites it and waits for both"
# source = "Driver API, Graph Management, cuGraphLaunch; Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-war", "second", "node"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct

x, result, first, second = ct.ones(N), ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
graph, one, two = ct.CUDAGraph(), ct.Stream(), ct.Stream()
with ct.graph(graph):
    result.copy_(x)  # @node
for _ in range(3):
    graph.replay()
    for stream in (one, two):
        stream.wait_stream(ct.current_stream())
    copy(one, first, result)
    copy(two, second, result)  # @second
    ct.current_stream().wait_stream(one)
    if sys.argv[1] == "fixed":
        ct.current_stream().wait_stream(two)
ct.synchronize()
