# race corpus
# rule = "A query of an event that answers done orders the host after the captured work; one that does not, nothing"
# source = "Driver API, Event Management, cuEventQuery"
# cuda = "a GPU may be done before it is asked"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# early = [["race-raw", "write", "read"]]
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
if sys.argv[1] == "fixed":
    while not after.query():
        pass
elif sys.argv[1] == "early":
    while not before.query():  # done, but the write came later
        pass
else:
    assert not after.query()  # not done, and yet on it goes
copy(consumer, y, x)  # @read
