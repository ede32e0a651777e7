# race corpus
# rule = "A call with unknown accesses counts with the accesses that the program declares"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams; cudatool.annotate"
# [expect]
# racy = [["race-raw", "write", "call"]]
# fixed = []
# ---
import sys

from race_kernels import N, host_function

import cudatool as ct

x, pinned = ct.ones(N), ct.empty_pinned(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
with ct.stream(first):
    x.get(pinned, blocking=False)  # @write
if sys.argv[1] == "fixed":
    second.wait_stream(first)
with ct.annotate(reads=[pinned], stream=second, name="library call"):  # @call
    host_function(second, lambda: None)  # @call
ct.synchronize()
