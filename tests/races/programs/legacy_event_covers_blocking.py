# race corpus
# rule = "An event recorded in the legacy default stream comes after all work of the blocking streams"
# source = "Driver API, 3. Stream synchronization behavior, Legacy default stream; cuEventRecord"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, blocking_stream, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer = blocking_stream() if sys.argv[1] == "fixed" else ct.Stream()
consumer = ct.Stream()
fill(producer, x)  # @write
consumer.wait_event(ct.default_stream().record_event())
copy(consumer, y, x)  # @read
