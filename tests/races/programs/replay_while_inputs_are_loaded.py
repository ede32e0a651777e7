# race corpus
# rule = "A graph reads its inputs at each launch: who loads them on another stream waits for the launch, and it for them"
# source = "CUDA Programming Guide, CUDA Graphs; Driver API, Graph Management, cuGraphLaunch"
# cuda = "what the nodes of a graph access is not recorded on a GPU"
# [expect]
# racy = [["race-war", "node", "load"], ["race-raw", "load", "node"]]
# fixed = []
# ---
import sys

import cudatool as ct
from cudatool import blas, ops

x, host = ct.ones((16, 16)), ct.empty_pinned((16, 16))
graph, loader = ct.CUDAGraph(), ct.Stream()
ops.relu(blas.mm(x, x))
ct.synchronize()
with ct.graph(graph):
    product = blas.mm(x, x)  # @node
    y = ops.relu(product)
for _ in range(2):
    graph.replay()
    if sys.argv[1] == "fixed":
        loader.wait_stream(ct.current_stream())
    with ct.stream(loader):
        x.copy_(host, non_blocking=True)  # @load
    if sys.argv[1] == "fixed":
        ct.current_stream().wait_stream(loader)
ct.synchronize()
