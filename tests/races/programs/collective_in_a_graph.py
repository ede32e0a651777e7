# race corpus
# rule = "A collective operation that was captured is a node, which runs at each launch"
# source = "NCCL User Guide, Using NCCL with CUDA Graphs"
# [expect]
# racy = [["race-war", "node", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct
from cudatool import nccl

x, whole = ct.ones(N), ct.zeros(N)
(communicator,) = nccl.init_all([0])
graph, side = ct.CUDAGraph(), ct.Stream()
ct.synchronize()
with ct.graph(graph):
    communicator.all_gather(x, whole)  # @node
graph.replay()
if sys.argv[1] == "fixed":
    side.wait_stream(ct.current_stream())
fill(side, x)  # @write
ct.synchronize()
