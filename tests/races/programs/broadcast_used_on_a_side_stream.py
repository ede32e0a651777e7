# race corpus
# rule = "Copies to several devices run on the current stream of each"
# source = "torch.cuda.comm.broadcast; Driver API, Stream Management"
# devices = 2
# [expect]
# racy = [["race-raw", "broadcast", "use"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct
from cudatool import comm

x, y, z = ct.ones(N, device=0), ct.zeros(N, device=1), ct.zeros(N, device=1)
side = ct.Stream(1)
ct.synchronize(0), ct.synchronize(1)
comm.broadcast(x, out=[ct.zeros(N, device=0), y])  # @broadcast
if sys.argv[1] == "fixed":
    side.wait_stream(ct.current_stream(1))
else:
    ct.current_stream(1).wait_stream(side)
with ct.device(1):
    copy(side, z, y)  # @use
ct.synchronize(0), ct.synchronize(1)
