# race corpus
# rule = "What a host function writes is there for later work of its stream, and for streams that wait for it"
# source = "Driver API, Execution Control, cuLaunchHostFunc; Stream Management, cuStreamWaitEvent"
# cuda = "calls of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-host", "write", "copy"]]
# fixed = []
# ---
import sys

from race_kernels import N, host_function

import cudatool as ct

x, pinned = ct.zeros(N), ct.empty_pinned(N)
ct.synchronize()
first, second = ct.Stream(), ct.Stream()


def prepare():
    ct.host_view(pinned)[:] = 3.0  # @write


host_function(first, prepare)
if sys.argv[1] == "fixed":
    second.wait_stream(first)
with ct.stream(second):
    x.copy_(pinned, non_blocking=True)  # @copy
ct.synchronize()
