# race corpus
# rule = "Kernels that touch every second element, one the even and one the odd ones, do not meet"
# source = "CUDA C++ Programming Guide, Memory model (accesses to distinct locations do not conflict)"
# cuda = "accesses are inferred by whole arguments"
# [expect]
# racy = [["race-waw", "even", "other"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill_every

import cudatool as ct

x = ct.zeros(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
fill_every(first, x, step=2)  # @even
if sys.argv[1] == "fixed":
    fill_every(second, x, step=2, first=1)  # @odd
else:
    fill_every(second, x, step=3)  # @other
ct.synchronize()
