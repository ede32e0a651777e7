# race corpus
# rule = "Recording an event again overwrites what it captured; a wait sees the latest record"
# source = "Driver API, Event Management, cuEventRecord (most recently captured state)"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, z = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, other, consumer, event = ct.Stream(), ct.Stream(), ct.Stream(), ct.Event()
fill(producer, x)  # @write
event.record(producer)
if sys.argv[1] == "fixed":
    consumer.wait_event(event)
fill(other, z)
event.record(other)
consumer.wait_event(event)
copy(consumer, y, x)  # @read
