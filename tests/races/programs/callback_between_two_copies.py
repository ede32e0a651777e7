# race corpus
# rule = "A host function comes between the copies of its stream, not between those of two"
# source = "Driver API, Execution Control, cuLaunchHostFunc"
# cuda = "host functions are not recorded on a GPU"
# [expect]
# racy = [["race-host", "callback", "second"]]
# fixed = []
# ---
import sys

from race_kernels import N, host_function

import cudatool as ct

x, y, pinned = ct.ones(N), ct.ones(N), ct.host_view(ct.empty_pinned(N))
one, two, seen = ct.Stream(), ct.Stream(), []
ct.synchronize()
with ct.stream(one):
    x.get(pinned, blocking=False)  # @first
host_function(one, lambda: seen.append(float(pinned[0])))  # @callback
with ct.stream(one if sys.argv[1] == "fixed" else two):
    y.get(pinned, blocking=False)  # @second
ct.synchronize()
