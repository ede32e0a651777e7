# race corpus
# rule = "A result is fetched on the stream that makes it, or after waiting for it"
# source = "Driver API, 3. Stream synchronization behavior, Legacy default stream (non-blocking streams)"
# [expect]
# racy = [["race-raw", "write", "fetch"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x, side = ct.zeros(N), ct.Stream()
ct.synchronize()
fill(side, x)  # @write
if sys.argv[1] == "fixed":
    ct.current_stream().wait_stream(side)
x.get()  # @fetch
ct.synchronize()
