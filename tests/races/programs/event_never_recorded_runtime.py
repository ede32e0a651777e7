# race corpus
# rule = "Before its first record an event is an empty set of work: waiting for it does nothing"
# source = "Driver API, Event Management, cuEventRecord (before the first call)"
# [expect]
# racy = [["race-raw", "write", "read"], ["wait-unrecorded", "wait", "wait"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer, event = ct.Stream(), ct.Stream(), ct.Event()
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    event.record(producer)
consumer.wait_event(event)  # @wait
copy(consumer, y, x)  # @read
