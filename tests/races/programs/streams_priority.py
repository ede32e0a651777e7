# race corpus
# rule = "The priority of a stream is a hint and orders nothing"
# source = "Driver API, Stream Management, cuStreamCreateWithPriority"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
urgent, other = ct.Stream(priority=-5), ct.Stream(priority=0)
fill(urgent, x)  # @write
if sys.argv[1] == "fixed":
    other.wait_stream(urgent)
copy(other, y, x)  # @read
