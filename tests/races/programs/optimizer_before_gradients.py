# race corpus
# rule = "A fused optimizer reads the gradients on the stream that is current, also through its lists of pointers"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-raw", "write", "step"]]
# fixed = []
# ---
import sys

import cudatool as ct
from cudatool import blas, optim

x, side = ct.ones((16, 16)), ct.Stream()
weights, gradients = [ct.ones((16, 16)), ct.ones(5)], [ct.zeros((16, 16)), ct.zeros(5)]
optimizer = optim.AdamW(weights, lr=0.1)
ct.synchronize()
with ct.stream(side):
    blas.mm(x, x, out=gradients[0])  # @write
if sys.argv[1] == "fixed":
    ct.current_stream().wait_stream(side)
optimizer.step(gradients)  # @step
ct.synchronize()
