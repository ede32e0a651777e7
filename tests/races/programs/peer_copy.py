# race corpus
# rule = "A copy between devices is work on its stream and needs an order with the source's writer"
# source = "Driver API, Memory Management, cuMemcpyPeerAsync; Stream Management, cuStreamWaitEvent"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "copy"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x, y = ct.zeros(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
side = ct.Stream(0)
fill(side, x)  # @write
if sys.argv[1] == "fixed":
    ct.current_stream(0).wait_stream(side)
y.copy_(x)  # @copy
ct.synchronize(0), ct.synchronize(1)
