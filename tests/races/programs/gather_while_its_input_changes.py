# race corpus
# rule = "A collective operation reads its input until it is done: who changes it in place waits"
# source = "NCCL User Guide, CUDA Stream Semantics"
# devices = 2
# [expect]
# racy = [["race-war", "gather", "update"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one

import cudatool as ct
from cudatool import nccl

parts = [ct.ones(N, device=i) for i in (0, 1)]
wholes = [ct.zeros(2 * N, device=i) for i in (0, 1)]
communicators, side = nccl.init_all([0, 1]), [ct.Stream(0), ct.Stream(1)]
ct.synchronize(0), ct.synchronize(1)
for _ in range(2):
    for i in (0, 1):
        side[i].wait_stream(ct.current_stream(i))
    with nccl.group():
        for i in (0, 1):
            communicators[i].all_gather(parts[i], wholes[i], stream=side[i])  # @gather
    for i in (0, 1):
        if sys.argv[1] == "fixed":
            ct.current_stream(i).wait_stream(side[i])
        with ct.device(i):
            add_one(ct.current_stream(i), parts[i])  # @update
ct.synchronize(0), ct.synchronize(1)
