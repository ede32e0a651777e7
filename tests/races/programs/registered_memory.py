# race corpus
# rule = "Memory that was registered is pinned: an asynchronous copy reads it when its stream gets there"
# source = "Driver API, Memory Management, cuMemHostRegister; API synchronization behavior, Memcpy"
# [expect]
# racy = [["race-host", "copy", "write"]]
# fixed = []
# ---
import sys

import numpy as np
from race_kernels import N

import cudatool as ct

values, x = np.ones(N, np.float32), ct.zeros(N)
ct.synchronize()
registered = ct.host_register(values)
view = ct.host_view(values)
x.copy_(values, non_blocking=True)  # @copy
if sys.argv[1] == "fixed":
    ct.current_stream().synchronize()
view[::2] = 0.0  # @write
ct.synchronize()
registered.close()
