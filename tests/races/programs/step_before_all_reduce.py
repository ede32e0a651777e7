# race corpus
# rule = "A collective operation on a stream of its own overlaps with the backward pass; the step must wait for its sums"
# source = "NCCL, CUDA Stream Semantics: the operation is enqueued to the given stream and executed asynchronously"
# devices = 2
# [expect]
# racy = [["race-raw", "sum", "step"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct
from cudatool import nccl, optim

weights, gradients = [ct.zeros(N, device=i) for i in (0, 1)], [ct.ones(N, device=i) for i in (0, 1)]
optimizers = [optim.SGD([weight], lr=0.1) for weight in weights]
communicators, side = nccl.init_all([0, 1]), [ct.Stream(0), ct.Stream(1)]
for i in (0, 1):
    side[i].wait_stream(ct.current_stream(i))
with nccl.group():
    for i in (0, 1):
        communicators[i].all_reduce(gradients[i], stream=side[i])  # @sum
for i in (0, 1):
    if sys.argv[1] == "fixed":
        ct.current_stream(i).wait_stream(side[i])
    with ct.device(i):
        optimizers[i].step([gradients[i]])  # @step
ct.synchronize(0), ct.synchronize(1)
