# race corpus
# rule = "Views of one array race where they overlap, however different their addresses are"
# source = "CUDA C++ Programming Guide, Memory model (accesses to the same location conflict)"
# [expect]
# racy = [["race-waw", "front", "back"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x = ct.zeros(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()
fill(first, x[: 600 if sys.argv[1] == "racy" else 500], 1.0)  # @front
fill(second, x[500:], 2.0)  # @back
