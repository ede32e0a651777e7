# race corpus
# rule = "Gradients of one bucket may be summed while those of the next are made, in memory of its own"
# source = "NCCL User Guide, CUDA Stream Semantics"
# devices = 2
# [expect]
# racy = [["race-waw", "sum", "fill"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct
from cudatool import nccl

buckets = [ct.zeros(2 * N, device=i) for i in (0, 1)]
communicators, side = nccl.init_all([0, 1]), [ct.Stream(0), ct.Stream(1)]
ct.synchronize(0), ct.synchronize(1)
for i in (0, 1):
    with ct.device(i):
        fill(ct.current_stream(i), buckets[i][:N])
    side[i].wait_stream(ct.current_stream(i))
with nccl.group():
    for i in (0, 1):
        communicators[i].all_reduce(buckets[i][:N], stream=side[i])  # @sum
for i in (0, 1):
    with ct.device(i):
        next_ = buckets[i][N:] if sys.argv[1] == "fixed" else buckets[i][N - 1 :]
        fill(ct.current_stream(i), next_)  # @fill
ct.synchronize(0), ct.synchronize(1)
