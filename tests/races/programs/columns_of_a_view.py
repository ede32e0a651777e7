# race corpus
# rule = "Writes through strided views of one array race where their elements meet, not where their bounds do"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams (accesses are bytes, not buffers)"
# [expect]
# racy = [["race-waw", "left", "right"]]
# fixed = []
# ---
import sys

import cudatool as ct

x, source = ct.zeros((32, 32)), ct.ones((32, 17))
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
width = 16 if sys.argv[1] == "fixed" else 17
with ct.stream(first):
    x[:, :width].copy_(source[:, :width])  # @left
with ct.stream(second):
    x[:, 16:].copy_(source[:, :16])  # @right
ct.synchronize()
