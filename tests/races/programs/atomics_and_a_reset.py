# race corpus
# rule = "An ordinary write and an atomic update race"
# source = "CUDA C++ Programming Guide, Atomic Functions"
# [expect]
# racy = [["race-waw", "update", "reset"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_atomically, fill

import cudatool as ct

total = ct.zeros(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
add_atomically(first, total)  # @update
if sys.argv[1] == "fixed":
    second.wait_stream(first)
fill(second, total, 0.0)  # @reset
ct.synchronize()
