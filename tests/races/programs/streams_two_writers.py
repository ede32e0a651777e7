# race corpus
# rule = "Two writes to the same bytes need an order"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-waw", "one", "two"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x = ct.zeros(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
fill(first, x, 1.0)  # @one
if sys.argv[1] == "fixed":
    second.wait_stream(first)
fill(second, x, 2.0)  # @two
