# race corpus
# rule = "An event stands for its latest record, also if that was in another stream"
# source = "Driver API, Event Management, cuEventRecord"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, z = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, other, consumer = ct.Stream(), ct.Stream(), ct.Stream()
shared = ct.Event()
fill(producer, x)  # @write
shared.record(producer)
if sys.argv[1] == "fixed":
    consumer.wait_event(shared)
fill(other, z)
shared.record(other)
consumer.wait_event(shared)
copy(consumer, y, x)  # @read
ct.synchronize()
