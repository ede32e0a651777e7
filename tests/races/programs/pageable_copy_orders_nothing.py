# race corpus
# rule = "An asynchronous copy from pageable memory might be synchronous; that is no order to rely on"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Asynchronous (might be synchronous)"
# [expect]
# racy = [["race-raw", "copy", "read"]]
# fixed = []
# ---
import sys

import numpy as np
from race_kernels import N, copy

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
producer, consumer = ct.Stream(), ct.Stream()
with ct.stream(producer):
    x.copy_(np.ones(N, np.float32), non_blocking=True)  # @copy
if sys.argv[1] == "fixed":
    consumer.wait_stream(producer)
copy(consumer, y, x)  # @read
