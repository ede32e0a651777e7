# race corpus
# rule = "Orders are transitive: a stream that waits hands its own order on, also with no operation between"
# source = "Driver API, Stream Management, cuStreamWaitEvent; Event Management, cuEventRecord"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
a, b, c = ct.Stream(), ct.Stream(), ct.Stream()
fill(a, x)  # @write
written = a.record_event()
if sys.argv[1] == "fixed":
    b.wait_event(written)
between = b.record_event()
if sys.argv[1] == "racy":
    b.wait_event(written)  # after the record that c waits for
c.wait_event(between)
copy(c, y, x)  # @read
