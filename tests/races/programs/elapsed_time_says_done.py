# race corpus
# rule = "Between two events there is a time only when both have completed: the host may go on as behind a query"
# source = "Driver API, Event Management, cuEventElapsedTime"
# cuda = "a GPU may be done before it is asked"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x, pinned, stream = ct.zeros(N), ct.empty_pinned(N), ct.Stream()
ct.synchronize()
begin, filled, copied = (ct.Event(enable_timing=True) for _ in range(3))
begin.record(stream)
fill(stream, x)
filled.record(stream)
with ct.stream(stream):
    x.get(pinned, blocking=False)  # @copy
copied.record(stream)
for _ in range(1000):
    try:
        begin.elapsed_time(copied if sys.argv[1] == "fixed" else filled)
        break
    except ct.CudaError as error:
        not_ready = error
else:
    raise not_ready
float(pinned[0])  # @read
ct.synchronize()
