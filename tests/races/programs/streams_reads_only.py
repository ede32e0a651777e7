# race corpus
# rule = "Two reads do not conflict; a write conflicts with each read of another stream"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-war", "read", "rewrite"], ["race-war", "second-read", "rewrite"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, z = ct.ones(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
first, second, third = ct.Stream(), ct.Stream(), ct.Stream()
copy(first, y, x)  # @read
copy(second, z, x)  # @second-read
if sys.argv[1] == "racy":
    fill(third, x)  # @rewrite
