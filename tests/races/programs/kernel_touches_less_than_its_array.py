# race corpus
# rule = "A kernel that was passed an array may touch a part of it only"
# source = "CUDA C++ Programming Guide, Memory model (accesses to distinct locations do not conflict)"
# cuda = "accesses are inferred by whole arguments"
# [expect]
# racy = [["race-waw", "half", "rest"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x = ct.zeros(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
fill(first, x, 1.0, n=N // 2 if sys.argv[1] == "fixed" else N // 2 + 1)  # @half
fill(second, x[N // 2 :], 2.0)  # @rest
