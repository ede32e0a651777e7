# race corpus
# rule = "A block is safe to reuse when its other users' work is ordered before the reuse, not when it was enqueued"
# source = "PyTorch, torch.Tensor.record_stream; Driver API, Stream Management, cuStreamWaitEvent"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "write", "new-owner"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one, copy, fill

import cudatool as ct

y, main, side = ct.zeros(N), ct.Stream(), ct.Stream()
ct.synchronize()
with ct.stream(main):
    x = ct.empty(N)
    fill(main, x)
    side.wait_stream(main)
    add_one(side, x)  # @write
    done = side.record_event()
    del x
    if sys.argv[1] == "fixed":
        main.wait_event(done)
    x = ct.zeros(N)  # @new-owner
    if sys.argv[1] == "racy":
        main.wait_event(done)  # too late
    copy(main, y, x)
ct.synchronize()
