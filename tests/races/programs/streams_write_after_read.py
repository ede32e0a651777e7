# race corpus
# rule = "A write must be ordered after the reads of the old value"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-war", "read", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.ones(N), ct.zeros(N)
ct.synchronize()
reader, writer = ct.Stream(), ct.Stream()
copy(reader, y, x)  # @read
if sys.argv[1] == "fixed":
    writer.wait_stream(reader)
fill(writer, x, 2.0)  # @write
