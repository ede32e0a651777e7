# race corpus
# rule = "After a copy between devices the current stream of each waits for it; other streams do not"
# source = "PyTorch, CUDA semantics, Asynchronous execution: copies between devices; cuMemcpyPeerAsync"
# devices = 2
# [expect]
# racy = [["race-war", "copy", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x, y = ct.ones(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
side = ct.Stream(0)
y.copy_(x)  # @copy
fill(ct.current_stream(0) if sys.argv[1] == "fixed" else side, x)  # @write
ct.synchronize(0), ct.synchronize(1)
