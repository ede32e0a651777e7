# race corpus
# rule = "A collective operation on a side stream uses its buffers there: they must be recorded, or kept"
# source = "torch.Tensor.record_stream; NCCL User Guide, CUDA Stream Semantics"
# devices = 2
# [expect]
# racy = [["reuse", "sum", "new-owner"]]
# fixed = []
# recorded = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct
from cudatool import nccl

arrays = [ct.ones(N, device=i) for i in (0, 1)]
communicators, side = nccl.init_all([0, 1]), [ct.Stream(0), ct.Stream(1)]
for i in (0, 1):
    side[i].wait_stream(ct.current_stream(i))
with nccl.group():
    for i in (0, 1):
        communicators[i].all_reduce(arrays[i], stream=side[i])  # @sum
for i in (0, 1):
    if sys.argv[1] == "recorded":
        arrays[i].record_stream(side[i])
    if sys.argv[1] == "fixed":
        ct.current_stream(i).wait_stream(side[i])
del arrays
with ct.device(0):
    fill(ct.current_stream(0), ct.empty(N))  # @new-owner
ct.synchronize(0), ct.synchronize(1)
