# race corpus
# rule = "A copy that does not block leaves the order to the program; a blocking one has completed when it returns"
# source = "Driver API, 2. API synchronization behavior, Memcpy; cuStreamSynchronize"
# [expect]
# racy = [["race-raw", "copy", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy

import cudatool as ct

x, y, pinned, side = ct.empty(N), ct.empty(N), ct.empty_pinned(N), ct.Stream()
pinned[:] = 1.0
x.copy_(pinned, non_blocking=sys.argv[1] == "racy")  # @copy
copy(side, y, x)  # @read
ct.synchronize()
