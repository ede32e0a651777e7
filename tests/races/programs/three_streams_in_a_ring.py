# race corpus
# rule = "Streams that take turns wait each for the one before it, the first of a round for the last of the round before"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-raw", "update", "update"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_one

import cudatool as ct

x, streams = ct.zeros(N), [ct.Stream() for _ in range(3)]
ct.synchronize()
for turn in range(9):
    before, stream = streams[(turn - 1) % 3], streams[turn % 3]
    if turn % 3 or sys.argv[1] == "fixed":
        stream.wait_stream(before)
    add_one(stream, x)  # @update
ct.synchronize()
