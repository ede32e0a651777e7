# race corpus
# rule = "Launches of one graph come in order; the copies into its inputs are work of their stream, and do not"
# source = "torch.cuda.make_graphed_callables; Driver API, Graph Management, cuGraphLaunch"
# [expect]
# racy = [["race-war", "node", "call"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

data = [ct.ones(N), ct.ones(N)]
ct.synchronize()


def step(x):
    y = ct.empty(N)
    return y.copy_(x)  # @node


graphed = ct.make_graphed_callables(step, (ct.zeros(N),))
ct.synchronize()
streams = [ct.Stream(), ct.Stream()]
for x, stream in zip(data, streams, strict=True):
    if sys.argv[1] == "fixed":
        stream.wait_stream(streams[0])
    with ct.stream(stream):
        graphed(x)  # @call
ct.synchronize()
