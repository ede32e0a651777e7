# race corpus
# rule = "Strided views that interleave have no byte in common, with any step"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-waw", "every-third", "more"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x = ct.zeros(3 * N)
ct.synchronize()
streams = [ct.Stream() for _ in range(3)]
with ct.stream(streams[0]):
    x[0::3].fill_(1)  # @every-third
with ct.stream(streams[1]):
    x[1::3].fill_(2)
with ct.stream(streams[2]):
    if sys.argv[1] == "fixed":
        x[2::3].fill_(3)
    else:
        x[2 : 3 * N // 2 : 2][::3].fill_(3)
        x[3 * N // 2 + 2 :: 5][:1].fill_(3)
        x[6:].reshape(N - 2, 3)[5, :1].fill_(3)  # @more
ct.synchronize()
