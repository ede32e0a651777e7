# race corpus
# rule = "After synchronizing an event the host, and what it enqueues then, comes after the captured work"
# source = "Driver API, Event Management, cuEventSynchronize"
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
before = producer.record_event()
fill(producer, x)  # @write
after = producer.record_event()
(after if sys.argv[1] == "fixed" else before).synchronize()
copy(consumer, y, x)  # @read
