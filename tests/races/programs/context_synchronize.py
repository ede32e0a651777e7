# race corpus
# rule = "Synchronizing a context orders the host after all of its streams, non-blocking ones too, of that device alone"
# source = "Driver API, Context Management, cuCtxSynchronize"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize(0)
producer, consumer = ct.Stream(), ct.Stream()
fill(producer, x)  # @write
ct.synchronize(0 if sys.argv[1] == "fixed" else 1)
copy(consumer, y, x)  # @read
