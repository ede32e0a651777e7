# race corpus
# rule = "A stream that is given up still has its work to do, and orders nothing for others"
# source = "Driver API, Stream Management, cuStreamDestroy; torch.cuda.Stream"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()


def produce():
    stream = ct.Stream()
    fill(stream, x)  # @write
    return stream.record_event()  # it outlives its stream


ready = produce()
if sys.argv[1] == "fixed":
    ready.wait()
copy(ct.current_stream(), y, x)  # @read
ct.synchronize()
