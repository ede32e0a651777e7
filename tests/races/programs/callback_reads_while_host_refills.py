# race corpus
# rule = "What a host function reads must stay until it has run: enqueuing it waits for nothing"
# source = "Driver API, Execution Control, cuLaunchHostFunc"
# cuda = "host functions are not recorded on a GPU"
# [expect]
# racy = [["race-host", "copy", "refill"], ["race-host", "callback", "refill"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, host_function

import cudatool as ct

x, pinned, stream = ct.ones(N), ct.host_view(ct.empty_pinned(N)), ct.Stream()
seen, done = [], threading.Event()
ct.synchronize()


def check():
    seen.append(float(pinned[3]))  # @callback
    done.set()


with ct.stream(stream):
    x.get(pinned, blocking=False)  # @copy
host_function(stream, check)
if sys.argv[1] == "fixed":
    done.wait()
pinned[:] = 0.0  # @refill
ct.synchronize()
