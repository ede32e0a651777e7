# race corpus
# rule = "Any number of streams may wait for one event; that does not order them with each other"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-war", "read", "rewrite"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, first, second = ct.Stream(), ct.Stream(), ct.Stream()
fill(producer, x)
event = producer.record_event()
first.wait_event(event)
second.wait_event(event)
copy(first, y, x)  # @read
if sys.argv[1] == "fixed":
    second.wait_stream(first)
fill(second, x, 2.0)  # @rewrite
