# race corpus
# rule = "a.wait_stream(b) orders b before a, not a before b"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer = ct.Stream(), ct.Stream()
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    consumer.wait_stream(producer)
else:
    producer.wait_stream(consumer)
copy(consumer, y, x)  # @read
