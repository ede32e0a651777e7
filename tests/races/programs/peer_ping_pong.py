# race corpus
# rule = "Work of two devices that passes an array to and fro waits at each turn"
# source = "Driver API, Memory Management, cuMemcpyPeerAsync; Event Management"
# devices = 2
# [expect]
# racy = [["race-raw", "update", "back"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, y = ct.zeros(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
side = ct.Stream(1)
for _ in range(3):
    y.copy_(x)
    side.wait_stream(ct.current_stream(1))
    with ct.stream(side):
        y.fill_(1)  # @update
    if sys.argv[1] == "fixed":
        ct.current_stream(1).wait_stream(side)
    x.copy_(y)  # @back
ct.synchronize(0), ct.synchronize(1)
