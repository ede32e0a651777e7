# race corpus
# rule = "An event captures what the stream holds at the time of the record, not what comes later"
# source = "Driver API, Event Management, cuEventRecord"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer, event = ct.Stream(), ct.Stream(), ct.Event()
if sys.argv[1] == "racy":
    event.record(producer)
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    event.record(producer)
consumer.wait_event(event)
copy(consumer, y, x)  # @read
