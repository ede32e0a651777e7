# race corpus
# rule = "Each stream is asked for itself: that one is done says nothing of another"
# source = "Driver API, Stream Management, cuStreamQuery"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

arrays, streams = [ct.zeros(N) for _ in range(3)], [ct.Stream() for _ in range(3)]
pinned = ct.empty_pinned(3 * N)
ct.synchronize()
for number, (x, stream) in enumerate(zip(arrays, streams, strict=True)):
    fill(stream, x, number)
    with ct.stream(stream):
        x.get(pinned[number * N : (number + 1) * N], blocking=False)  # @copy
waiting = streams if sys.argv[1] == "fixed" else streams[:2]
while waiting := [stream for stream in waiting if not stream.query()]:
    pass
pinned.sum()  # @read
ct.synchronize()
