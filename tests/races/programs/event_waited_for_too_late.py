# race corpus
# rule = "A wait holds back future work of the stream only"
# source = "Driver API, Stream Management, cuStreamWaitEvent (all future work submitted to hStream)"
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
event = producer.record_event()
if sys.argv[1] == "fixed":
    consumer.wait_event(event)
copy(consumer, y, x)  # @read
if sys.argv[1] == "racy":
    consumer.wait_event(event)
