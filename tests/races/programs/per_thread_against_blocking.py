# race corpus
# rule = "The per-thread default stream does not synchronize with other streams, as if it had been created"
# source = "Driver API, 3. Stream synchronization behavior, Per-thread default stream"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, blocking_stream, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
mine, other = ct.ExternalStream(2), blocking_stream()
fill(mine, x)  # @write
if sys.argv[1] == "fixed":
    other.wait_event(mine.record_event())
copy(other, y, x)  # @read
