# race corpus
# rule = "A view that runs backwards touches the elements that it has, wherever its pointer stands"
# source = "numpy.ndarray.strides; CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-raw", "backwards", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N // 2)
ct.synchronize()
one, two = ct.Stream(), ct.Stream()
with ct.stream(one):
    x[::-1][: N // 2].fill_(1)  # @backwards
copy(two, y, x[N // 2 :] if sys.argv[1] == "racy" else x[: N // 2])  # @read
ct.synchronize()
