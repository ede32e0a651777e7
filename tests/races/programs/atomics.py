# race corpus
# rule = "Atomic updates of two kernels do not race; an atomic update and an ordinary read or write do"
# source = "CUDA C++ Programming Guide, Atomic Functions"
# [expect]
# racy = [["race-raw", "update", "read"]]
# fixed = []
# both = []
# ---
import sys

from race_kernels import N, add_atomically, copy

import cudatool as ct

total, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
if sys.argv[1] == "both":
    add_atomically(first, total)
    add_atomically(second, total)
else:
    add_atomically(first, total)  # @update
    if sys.argv[1] == "fixed":
        second.wait_stream(first)
    copy(second, y, total)  # @read
ct.synchronize()
