# race corpus
# rule = "Operations of different streams run in no order unless something orders them"
# source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer = ct.Stream(), ct.Stream()
fill(producer, x)  # @write
copy(producer if sys.argv[1] == "fixed" else consumer, y, x)  # @read
