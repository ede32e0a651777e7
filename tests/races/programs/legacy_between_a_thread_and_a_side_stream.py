# race corpus
# rule = "The legacy default stream orders per-thread and blocking streams with each other, not those made non-blocking"
# source = "CUDA Driver API, Stream synchronization behavior"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, blocking_stream, copy, fill

import cudatool as ct

x, y, z = ct.zeros(N), ct.zeros(N), ct.zeros(N)
ct.synchronize()
side = blocking_stream() if sys.argv[1] == "fixed" else ct.Stream()
thread = threading.Thread(target=lambda: fill(ct.ExternalStream(2), x))  # @write
thread.start()
thread.join()
fill(ct.default_stream(), z)
copy(side, y, x)  # @read
ct.synchronize()
