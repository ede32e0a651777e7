# race corpus
# rule = "A caching allocator knows the stream that a block was made for; other users must be made known, or waited for"
# source = "PyTorch, torch.Tensor.record_stream; Driver API, Stream Management, cuStreamWaitEvent"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "read", "new-owner"]]
# recorded = []
# waited = []
# kept = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

y, main, side = ct.zeros(N), ct.Stream(), ct.Stream()
ct.synchronize()
with ct.stream(main):
    x = ct.empty(N)
    fill(main, x, 1.0)
    side.wait_stream(main)
    copy(side, y, x)  # @read
    if sys.argv[1] == "recorded":
        x.record_stream(side)
    elif sys.argv[1] == "waited":
        main.wait_stream(side)
    old = x if sys.argv[1] == "kept" else None
    del x
    x = ct.empty(N)
    fill(main, x, 2.0)  # @new-owner
ct.synchronize()
