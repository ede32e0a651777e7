# race corpus
# rule = "record_stream on a view is one on its memory, however many views of it there are"
# source = "torch.Tensor.record_stream; torch.cuda, Memory management"
# [expect]
# racy = [["reuse", "read", "new-owner"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, side = ct.zeros(2 * N), ct.zeros(N), ct.Stream()
ct.synchronize()
side.wait_stream(ct.current_stream())
copy(side, y, x[N:])  # @read
if sys.argv[1] == "fixed":
    x[: N // 2].record_stream(side)
else:
    y.record_stream(side)
del x
z = ct.empty(2 * N)
fill(ct.current_stream(), z)  # @new-owner
ct.synchronize()
