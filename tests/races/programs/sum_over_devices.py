# race corpus
# rule = "A sum over devices reads each part behind the current stream of the part's device, not behind its others"
# source = "torch.cuda.comm.reduce_add; Driver API, Stream Management"
# devices = 2
# [expect]
# racy = [["race-raw", "part", "sum"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct
from cudatool import comm

parts = [ct.ones(N, device=i) for i in (0, 1)]
side = ct.Stream(1)
ct.synchronize(0), ct.synchronize(1)
with ct.device(1):
    fill(side, parts[1], 2.0)  # @part
if sys.argv[1] == "fixed":
    ct.current_stream(1).wait_stream(side)
comm.reduce_add(parts, destination=0)  # @sum
ct.synchronize(0), ct.synchronize(1)
