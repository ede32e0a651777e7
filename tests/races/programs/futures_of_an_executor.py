# race corpus
# rule = "A task that has returned has enqueued its work, not finished it"
# source = "CUDA Programming Guide, Asynchronous Execution"
# [expect]
# racy = [["race-raw", "part", "sum"]]
# fixed = []
# ---
import sys
from concurrent.futures import ThreadPoolExecutor

from race_kernels import N, copy, fill

import cudatool as ct

x, total = ct.zeros(2 * N), ct.zeros(2 * N)
ct.synchronize()


def part(number):
    stream = ct.Stream()
    with ct.stream(stream):
        fill(stream, x[number * N : (number + 1) * N])  # @part
        return stream.record_event()


with ThreadPoolExecutor(2) as pool:
    events = list(pool.map(part, range(2)))
for event in events if sys.argv[1] == "fixed" else ():
    event.wait()
copy(ct.current_stream(), total, x)  # @sum
ct.synchronize()
