# race corpus
# rule = "Blocking streams wait for what was queued in the legacy default stream, non-blocking ones do not"
# source = "Driver API, 3. Stream synchronization behavior, Legacy default stream"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, blocking_stream, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
stream = blocking_stream() if sys.argv[1] == "fixed" else ct.Stream()
fill(ct.default_stream(), x)  # @write
copy(stream, y, x)  # @read
