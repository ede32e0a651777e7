# race corpus
# rule = "Two streams that both wait for a third are not ordered with each other"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, start = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
third, first, second = ct.Stream(), ct.Stream(), ct.Stream()
fill(third, start)
first.wait_stream(third)
second.wait_stream(third)
fill(first, x)  # @write
if sys.argv[1] == "fixed":
    third.wait_stream(first)
    second.wait_stream(third)
copy(second, y, x)  # @read
