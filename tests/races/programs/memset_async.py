# race corpus
# rule = "A fill is work on its stream like any other"
# source = "Driver API, 2. API synchronization behavior, Memset (always asynchronous)"
# [expect]
# racy = [["race-raw", "memset", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct

side = ct.Stream()
y = ct.empty(N)
x = ct.zeros(N)  # @memset
if sys.argv[1] == "fixed":
    side.wait_stream(ct.current_stream())
copy(side, y, x)  # @read
ct.synchronize()
