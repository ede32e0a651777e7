# race corpus
# rule = "The per-thread default stream is no non-blocking stream: it synchronizes with the legacy default stream"
# source = "Driver API, 3. Stream synchronization behavior, Per-thread default stream"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
mine = ct.ExternalStream(2)
fill(mine, x)  # @write
copy(ct.default_stream() if sys.argv[1] == "fixed" else ct.Stream(), y, x)  # @read
