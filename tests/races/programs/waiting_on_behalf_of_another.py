# race corpus
# rule = "A stream hands on what it has waited for, also to one that waits for it before it has run anything"
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
a, b, c, d = (ct.Stream() for _ in range(4))
fill(a, x)  # @write
if sys.argv[1] == "fixed":
    b.wait_stream(a)
    c.wait_stream(b)
    d.wait_stream(c)
else:
    d.wait_stream(c)
    c.wait_stream(b)
    b.wait_stream(a)
copy(d, y, x)  # @read
ct.synchronize()
