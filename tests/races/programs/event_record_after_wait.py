# race corpus
# rule = "A wait is not affected by later records of its event"
# source = "Driver API, Event Management, cuEventRecord (not affected by later calls)"
# [expect]
# racy = [["race-raw", "second-write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one, copy, fill

import cudatool as ct

x, y, z = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer, event = ct.Stream(), ct.Stream(), ct.Event()
fill(producer, x)
event.record(producer)
consumer.wait_event(event)
add_one(producer, z)  # @second-write
event.record(producer)
if sys.argv[1] == "fixed":
    consumer.wait_event(event)
copy(consumer, y, x)
copy(consumer, y, z)  # @read
