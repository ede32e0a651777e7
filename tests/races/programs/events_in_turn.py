# race corpus
# rule = "Events used in turn stand for the latest round; each buffer waits for the event of its own last use"
# source = "Driver API, Event Management, cuEventRecord; Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-war", "read", "write"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

slots = 3
events = slots if sys.argv[1] == "fixed" else slots + 1  # one more: the event is that of the use before the last
buffers, out = [ct.zeros(N) for _ in range(slots)], ct.zeros(N)
producer, consumer = ct.Stream(), ct.Stream()
full, empty = ([ct.Event() for _ in range(events)] for _ in range(2))
ct.synchronize()
for batch in range(10):
    slot, turn = batch % slots, batch % events
    if batch >= events:
        producer.wait_event(empty[turn])
    fill(producer, buffers[slot])  # @write
    full[turn].record(producer)
    consumer.wait_event(full[turn])
    copy(consumer, out, buffers[slot])  # @read
    empty[turn].record(consumer)
ct.synchronize()
