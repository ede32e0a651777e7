# race corpus
# rule = "A collective operation is work on the stream of each rank, and needs an order with who wrote the rank's buffer"
# source = "NCCL, CUDA Stream Semantics: the operation is enqueued to the given stream and executed asynchronously"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "collect"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct
from cudatool import nccl

gradients, sums = [ct.zeros(N, device=i) for i in (0, 1)], [ct.zeros(N, device=i) for i in (0, 1)]
ct.synchronize(0), ct.synchronize(1)
side = ct.Stream(1)
fill(side, gradients[1])  # @write
if sys.argv[1] == "fixed":
    ct.current_stream(1).wait_stream(side)
nccl.all_reduce(gradients, sums)  # @collect
ct.synchronize(0), ct.synchronize(1)
