# race corpus
# rule = "All threads share the legacy default stream; a non-blocking stream waits for it only if told to"
# source = "CUDA Driver API, Stream synchronization behavior"
# [expect]
# racy = [["race-war", "read", "write"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, copy, fill

import cudatool as ct

x, y, side = ct.zeros(N), ct.zeros(N), ct.Stream()
ct.synchronize()


def work():
    copy(ct.default_stream(), y, x)  # @read


thread = threading.Thread(target=work)
thread.start()
thread.join()
if sys.argv[1] == "fixed":
    side.wait_stream(ct.default_stream())
fill(side, x)  # @write
ct.synchronize()
