# race corpus
# rule = "Pinned memory that one stream fills and another reads needs an order like device memory"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "out", "in"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, y, pinned = ct.ones(N), ct.zeros(N), ct.empty_pinned(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
with ct.stream(first):
    x.get(pinned, blocking=False)  # @out
if sys.argv[1] == "fixed":
    second.wait_stream(first)
with ct.stream(second):
    y.copy_(pinned, non_blocking=True)  # @in
ct.synchronize()
