# race corpus
# rule = "A copy may fill memory that an earlier copy of its stream has filled, waited for or not; copies of two race"
# source = "Driver API, Stream Management; CUDA C++ Programming Guide, 3.2.8.5 Streams"
# [expect]
# racy = [["race-waw", "first", "second"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

x, y, z, pinned = ct.ones(N), ct.ones(N), ct.ones(N), ct.empty_pinned(N)
one, two = ct.Stream(), ct.Stream()
ct.synchronize()
with ct.stream(one):
    x.get(pinned, blocking=False)  # @first
fill(two, z, 2.0)
two.synchronize()  # the copy may be done by then
with ct.stream(one if sys.argv[1] == "fixed" else two):
    y.get(pinned, blocking=False)  # @second
ct.synchronize()
