# race corpus
# rule = "An asynchronous copy reads pinned memory when the stream gets there; memory that is not pinned is staged first"
# source = "Driver API, 2. API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-host", "copy", "write"]]
# fixed = []
# pageable = []
# ---
import sys

import numpy as np
from race_kernels import N

import cudatool as ct

x, stream = ct.zeros(N), ct.Stream()
ct.synchronize()
source = np.ones(N, np.float32) if sys.argv[1] == "pageable" else ct.empty_pinned(N)
source[:] = 1.0
with ct.stream(stream):
    x.copy_(source, non_blocking=True)  # @copy
if sys.argv[1] == "fixed":
    stream.synchronize()
ct.host_view(source)[:] = 2.0  # @write
