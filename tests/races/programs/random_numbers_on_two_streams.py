# race corpus
# rule = "Generators give numbers to any stream; the arrays that they fill are ordered like all others"
# source = "torch.cuda.random; CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-raw", "draw", "use"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct

y, side, other = ct.zeros(N), ct.Stream(), ct.Stream()
ct.synchronize()
ct.manual_seed(3)
with ct.stream(side):
    x = ct.random.rand(N)  # @draw
with ct.stream(other):
    z = ct.random.rand(N)
other.wait_stream(side if sys.argv[1] == "fixed" else other)
copy(other, y, x)  # @use
ct.synchronize()
