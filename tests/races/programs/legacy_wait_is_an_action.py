# race corpus
# rule = "A wait for an event in the legacy default stream is an action there, and comes between blocking streams"
# source = "Driver API, 3. Stream synchronization behavior, Legacy default stream (cudaStreamWaitEvent)"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, blocking_stream, copy, fill

import cudatool as ct

x, y, unrelated = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
first, second, elsewhere = blocking_stream(), blocking_stream(), ct.Stream()
fill(elsewhere, unrelated)
event = elsewhere.record_event()
fill(first, x)  # @write
if sys.argv[1] == "fixed":
    ct.default_stream().wait_event(event)
copy(second, y, x)  # @read
