# race corpus
# rule = "A host function runs after the stream's earlier work and before its later work"
# source = "Driver API, Execution Control, cuLaunchHostFunc"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "copy", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, host_function

import cudatool as ct

x, pinned = ct.ones(N), ct.empty_pinned(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()


def look():
    float(ct.host_view(pinned)[0])  # @read


with ct.stream(first):
    x.get(pinned, blocking=False)  # @copy
host_function(first if sys.argv[1] == "fixed" else second, look)
ct.synchronize()
