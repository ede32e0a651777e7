# race corpus
# rule = "What is enqueued after a wait for an event runs after the work that the event captured"
# source = "Driver API, Stream Management, cuStreamWaitEvent; Event Management, cuEventRecord"
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
fill(producer, x)  # @write
event.record(producer)
if sys.argv[1] == "fixed":
    consumer.wait_event(event)
copy(consumer, y, x)  # @read
