# race corpus
# rule = "What was received is there for the stream that received it"
# source = "NCCL User Guide, Point-to-point communication; CUDA Stream Semantics"
# devices = 2
# [expect]
# racy = [["race-raw", "receive", "use"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct
from cudatool import nccl

x, y, z = ct.ones(N, device=0), ct.zeros(N, device=1), ct.zeros(N, device=1)
communicators, side = nccl.init_all([0, 1]), ct.Stream(1)
ct.synchronize(0), ct.synchronize(1)
with nccl.group():
    communicators[0].send(x, 1)
    communicators[1].recv(y, 0)  # @receive
if sys.argv[1] == "fixed":
    side.wait_stream(ct.current_stream(1))
else:
    side.wait_stream(ct.current_stream(0))  # the sender's end says nothing of the receiver's
with ct.device(1):
    copy(side, z, y)  # @use
ct.synchronize(0), ct.synchronize(1)
