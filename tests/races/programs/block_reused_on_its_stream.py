# race corpus
# rule = "A block that one stream alone uses may be handed out again at once on that stream"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams (in order within a stream)"
# memcheck = ["use-after-free", "out-of-bounds"]
# [expect]
# racy = [["reuse", "use", "next-use"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one

import cudatool as ct

main, side = ct.Stream(), ct.Stream()
if sys.argv[1] == "racy":
    side.wait_stream(main)
with ct.stream(main):
    for _ in range(3):
        x = ct.zeros(N)  # @next-use
        if sys.argv[1] == "racy":
            side.wait_stream(main)
        add_one(side if sys.argv[1] == "racy" else main, x)  # @use
        del x
ct.synchronize()
