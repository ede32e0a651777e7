# race corpus
# rule = "The operations of one group come in no order, even on one stream; those of two groups come in stream order"
# source = "NCCL User Guide, Group Calls"
# devices = 2
# [expect]
# racy = [["race-raw", "sum", "share"], ["race-war", "sum", "share"]]
# fixed = []
# separate = []
# ---
import sys

from race_kernels import N

import cudatool as ct
from cudatool import nccl

arrays, others = ([ct.ones(N, device=i) for i in (0, 1)] for _ in range(2))
shared = others if sys.argv[1] == "separate" else arrays
communicators = nccl.init_all([0, 1])
ct.synchronize(0), ct.synchronize(1)


def add():
    for i in (0, 1):
        communicators[i].all_reduce(arrays[i])  # @sum


def share():
    for i in (0, 1):
        communicators[i].broadcast(shared[i])  # @share


if sys.argv[1] == "fixed":
    with nccl.group():
        add()
    with nccl.group():
        share()
else:
    with nccl.group():
        add()
        share()
ct.synchronize(0), ct.synchronize(1)
