# race corpus
# rule = "Who gathers the results of many streams waits for each, in whatever order they were started"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "part", "gather"]]
# fixed = []
# ---
import sys

from race_kernels import copy, fill

import cudatool as ct

count, size = 40, 64
x, y = ct.zeros(count * size), ct.zeros(count * size)
ct.synchronize()
streams = [ct.Stream() for _ in range(count)]  # more than the pool has: some are the same
for number, stream in enumerate(streams):
    fill(stream, x[number * size : (number + 1) * size], float(number))  # @part
last = count - (sys.argv[1] == "racy")
for stream in streams[:last][::-1]:
    ct.current_stream().wait_stream(stream)
copy(ct.current_stream(), y, x)  # @gather
ct.synchronize()
