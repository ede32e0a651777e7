# race corpus
# rule = "Copies within one buffer race where one reads what the other writes"
# source = "Driver API, Memory Management, cuMemcpyDtoDAsync"
# [expect]
# racy = [["race-raw", "shift", "take"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x, y = ct.zeros(2 * N), ct.zeros(N // 2)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
with ct.stream(first):
    x[512:1024].copy_(x[:512])  # @shift
begin = 1024 if sys.argv[1] == "fixed" else 1000
with ct.stream(second):
    y.copy_(x[begin : begin + 512])  # @take
ct.synchronize()
