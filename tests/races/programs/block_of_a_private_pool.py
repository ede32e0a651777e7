# race corpus
# rule = "What holds for the allocator's own blocks holds for those of a private pool"
# source = "PyTorch, torch.cuda.MemPool; torch.Tensor.record_stream"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "use", "new-owner"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one, fill

import cudatool as ct

main, side, pool = ct.Stream(), ct.Stream(), ct.MemPool()
with ct.stream(main), ct.use_mem_pool(pool):
    x = ct.zeros(N)
    side.wait_stream(main)
    add_one(side, x)  # @use
    if sys.argv[1] == "fixed":
        main.wait_stream(side)
    del x
    x = ct.empty(N)
    fill(main, x)  # @new-owner
ct.synchronize()
del x
