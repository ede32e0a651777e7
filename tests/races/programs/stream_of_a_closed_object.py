# race corpus
# rule = "A stream that is used again after its object is gone is the same stream, and keeps its order"
# source = "Driver API, Stream Management"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
stream = ct.Stream()
handle = stream.cuda_stream
fill(stream, x)  # @write
del stream
again = ct.ExternalStream(handle) if sys.argv[1] == "fixed" else ct.Stream()
copy(again, y, x)  # @read
ct.synchronize()
