# race corpus
# rule = "An action in the legacy default stream waits for all blocking streams, not for non-blocking ones"
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
fill(stream, x)  # @write
copy(ct.default_stream(), y, x)  # @read
