# race corpus
# rule = "Blocking streams are not ordered with each other, but a launch in the legacy default stream comes between them"
# source = "Driver API, 3. Stream synchronization behavior, Legacy default stream (k_1, k_2, k_3)"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, blocking_stream, copy, fill

import cudatool as ct

x, y, unrelated = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
first, second = blocking_stream(), blocking_stream()
fill(first, x)  # @write
if sys.argv[1] == "fixed":
    fill(ct.default_stream(), unrelated)
copy(second, y, x)  # @read
