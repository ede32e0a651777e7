# race corpus
# rule = "A kernel that reads another device's memory needs an order with that device's streams"
# source = "CUDA Programming Guide, Multi-Device System, Peer-to-Peer Memory Access"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

ct.enable_peer_access(1, 0)
x, y = ct.zeros(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
producer, consumer = ct.Stream(0), ct.Stream(1)
fill(producer, x)  # @write
if sys.argv[1] == "fixed":
    consumer.wait_event(producer.record_event())
else:
    ct.synchronize(1)
with ct.device(1):
    copy(consumer, y, x)  # @read
ct.synchronize(0), ct.synchronize(1)
