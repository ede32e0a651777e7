# race corpus
# rule = "Blocks of one matrix, also of its transpose, race where they have an element in common"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-waw", "left", "columns"]]
# fixed = []
# ---
import sys

import cudatool as ct

x = ct.zeros((48, 64))
ct.synchronize()
one, two, three = ct.Stream(), ct.Stream(), ct.Stream()
with ct.stream(one):
    x[:, :20].fill_(1)  # @left
with ct.stream(two):
    x[8:40, 20:40].fill_(2)
with ct.stream(three):
    x.T[40:].fill_(3)
    x[:8, 20:40].fill_(3)
    x[40:, 20:40].fill_(3)
    if sys.argv[1] == "racy":
        x.T[19:21, 45:].fill_(4)  # @columns
ct.synchronize()
