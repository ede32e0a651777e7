# race corpus
# rule = "An operator reads its operands on the stream that is current: another one's result must be waited for"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams; torch.cuda, CUDA semantics, CUDA streams"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct
from cudatool import ops

x, side = ct.ones(N), ct.Stream()
ct.synchronize()
with ct.stream(side):
    y = ops.relu(x)  # @write
if sys.argv[1] == "fixed":
    ct.current_stream().wait_stream(side)
z = y + 1  # @read
ct.synchronize()
