# race corpus
# rule = "Synchronizing a stream orders the host also after all that the stream itself waited for"
# source = "Driver API, Stream Management, cuStreamSynchronize, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, between, consumer = ct.Stream(), ct.Stream(), ct.Stream()
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    between.wait_stream(producer)
between.synchronize()
copy(consumer, y, x)  # @read
