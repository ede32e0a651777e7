# race corpus
# rule = "Each host thread has a per-thread default stream of its own"
# source = "Driver API, 3. Stream synchronization behavior, Per-thread default stream (local to the thread)"
# [expect]
# racy = [["race-raw", "write", "read"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, copy, fill

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()


def produce():
    mine = ct.ExternalStream(2)
    fill(mine, x)  # @write
    if sys.argv[1] == "fixed":
        mine.synchronize()


thread = threading.Thread(target=produce)
thread.start()
thread.join()
copy(ct.ExternalStream(2), y, x)  # @read
