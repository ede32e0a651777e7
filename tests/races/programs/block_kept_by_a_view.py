# race corpus
# rule = "A block lives as long as any view of it; when the last is gone it is handed out again"
# source = "PyTorch, torch.Tensor.record_stream; Driver API, Stream Management, cuStreamWaitEvent"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "use", "new-owner"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one, fill

import cudatool as ct

main, side = ct.Stream(), ct.Stream()
with ct.stream(main):
    x = ct.zeros(N)
    part = x[N // 2 :]
    side.wait_stream(main)
    add_one(side, part)  # @use
    del x
    if sys.argv[1] == "racy":
        del part
    other = ct.empty(N)
    fill(main, other)  # @new-owner
ct.synchronize()
