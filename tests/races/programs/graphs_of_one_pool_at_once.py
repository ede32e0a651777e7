# race corpus
# rule = "Graphs that share a pool share temporary memory, and so must not run at the same time"
# source = "torch.cuda, CUDA graphs, Sharing memory across captures; Programming Guide, CUDA Graphs"
# [expect]
# racy = [["race-waw", "first", "second"]]
# relaunched = [["race-waw", "first", "second"]]
# fixed = []
# apart = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

first, second, side = ct.CUDAGraph(), ct.CUDAGraph(), ct.Stream()
with ct.graph(first):
    temporary = ct.empty(N)
    fill(ct.current_stream(), temporary)  # @first
    temporary = None
if sys.argv[1] == "relaunched":
    first.replay()
with ct.graph(second, pool=None if sys.argv[1] == "apart" else first.pool()):
    temporary = ct.empty(N)
    fill(ct.current_stream(), temporary)  # @second
    temporary = None
ct.synchronize()
first.replay()
if sys.argv[1] == "fixed":
    side.wait_stream(ct.current_stream())
with ct.stream(side):
    second.replay()
ct.synchronize()
