# race corpus
# rule = "Every stream that uses a block must be made known, not one of them"
# source = "PyTorch, torch.Tensor.record_stream"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "second-use", "new-owner"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

y, z = ct.zeros(N), ct.zeros(N)
ct.synchronize()
main, first, second = ct.Stream(), ct.Stream(), ct.Stream()
with ct.stream(main):
    x = ct.empty(N)
    fill(main, x)
    written = main.record_event()
    first.wait_event(written), second.wait_event(written)
    copy(first, y, x)
    x.record_stream(first)
    copy(second, z, x)  # @second-use
    if sys.argv[1] == "fixed":
        x.record_stream(second)
    del x
    first.synchronize()  # so that the block is free again
    x = ct.empty(N)
    fill(main, x, 2.0)  # @new-owner
ct.synchronize()
