# race corpus
# rule = "An operator that makes several launches reads its operand in the first ones: who writes it waits for all"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-war", "sum", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct
from cudatool import ops

x, side = ct.ones(512 * N), ct.Stream()
ct.synchronize()
total = ops.sum(x)  # @sum
if sys.argv[1] == "fixed":
    side.wait_stream(ct.current_stream())
fill(side, x, 2.0, N)  # @write
total.get()
ct.synchronize()
