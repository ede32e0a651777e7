# race corpus
# rule = "A broadcast view reads the elements that it repeats and no others"
# source = "numpy.broadcast_to; CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-war", "read", "write"]]
# fixed = []
# ---
import sys

import cudatool as ct

x, y = ct.zeros((8, 256)), ct.zeros((16, 256))
ct.synchronize()
one, two = ct.Stream(), ct.Stream()
with ct.stream(one):
    y.copy_(x[3].broadcast_to((16, 256)))  # @read
with ct.stream(two):
    x[:3].fill_(1)
    x[4:].fill_(1)
    if sys.argv[1] == "racy":
        x[3, 255:].fill_(1)  # @write
ct.synchronize()
