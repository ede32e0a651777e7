# race corpus
# rule = "Synchronizing a stream orders the host, and what it enqueues then, after that stream's work"
# source = "Driver API, Stream Management, cuStreamSynchronize"
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
(producer if sys.argv[1] == "fixed" else consumer).synchronize()
copy(consumer, y, x)  # @read
