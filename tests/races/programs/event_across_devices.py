# race corpus
# rule = "A stream may wait for an event of another device"
# source = "Driver API, Stream Management, cuStreamWaitEvent (may be from a different context or device)"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x, y = ct.zeros(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
producer, consumer = ct.Stream(0), ct.Stream(1)
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    consumer.wait_event(producer.record_event())
with ct.stream(consumer):  # the copy itself is in order with the current stream of device 0, which is not `producer`
    y.copy_(x)  # @read
