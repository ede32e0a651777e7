# race corpus
# rule = "Parts that were scattered are ready on the current stream of their devices, and the source may change then"
# source = "torch.cuda.comm.scatter; Driver API, Memory Management, cuMemcpyPeerAsync"
# devices = 2
# [expect]
# racy = [["race-war", "scatter", "refill"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct
from cudatool import comm

x, side = ct.ones(2 * N, device=0), ct.Stream(0)
parts = [ct.zeros(N, device=i) for i in (0, 1)]
ct.synchronize(0), ct.synchronize(1)
comm.scatter(x, out=parts)  # @scatter
for i, part in enumerate(parts):
    with ct.device(i):
        fill(ct.current_stream(i), part, 2.0)
if sys.argv[1] == "fixed":
    side.wait_stream(ct.current_stream(0))
    side.wait_stream(ct.current_stream(1))
fill(side, x[N:], 3.0)  # @refill
ct.synchronize(0), ct.synchronize(1)
