# race corpus
# rule = "The next call of a graphed function overwrites the result of this one, which another stream may still read"
# source = "torch.cuda.make_graphed_callables; CUDA Programming Guide, CUDA Graphs"
# cuda = "what the nodes of a graph access is not recorded on a GPU"
# [expect]
# racy = [["race-war", "read", "node"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct
from cudatool import graphs, ops

kept, reader = [ct.empty(N), ct.empty(N)], ct.Stream()


def function(x):
    return ops.exp(x)  # @node


x = ct.ones(N)
graphed = graphs.make_graphed_callables(function, (x,))
ct.synchronize()
for i in (0, 1):
    y = graphed(x)
    reader.wait_stream(ct.current_stream())
    copy(reader, kept[i], y)  # @read
    if sys.argv[1] == "fixed":
        ct.current_stream().wait_stream(reader)
ct.synchronize()
