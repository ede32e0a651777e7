# race corpus
# rule = "A query of a stream that answers done orders the host after the stream's work; one that does not, nothing"
# source = "Driver API, Stream Management, cuStreamQuery"
# cuda = "a GPU may be done before it is asked"
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
if sys.argv[1] == "fixed":
    while not producer.query():
        pass
else:
    assert not producer.query()
copy(consumer, y, x)  # @read
