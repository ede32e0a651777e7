# race corpus
# rule = "A host that waits for a host function to say so comes after the stream's earlier work"
# source = "Driver API, Execution Control, cuLaunchHostFunc (after currently enqueued work)"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys
import threading

from race_kernels import N, host_function

import cudatool as ct

x, pinned, done = ct.ones(N), ct.empty_pinned(N), threading.Event()
ct.synchronize()
stream = ct.Stream()
with ct.stream(stream):
    x.get(pinned, blocking=False)  # @copy
host_function(stream, done.set)
if sys.argv[1] == "fixed":
    done.wait()
float(ct.host_view(pinned)[0])  # @read
ct.synchronize()
