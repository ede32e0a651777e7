# race corpus
# rule = "An asynchronous copy may run beside another one of the same buffer if they have no byte in common"
# source = "API synchronization behavior, Memcpy, Asynchronous"
# [expect]
# racy = [["race-war", "down", "up"]]
# fixed = []
# ---
import sys

from race_kernels import N

import cudatool as ct

x = ct.zeros(N)
down, up = ct.empty_pinned(N // 2), ct.empty_pinned(N // 2)
up[:] = 1.0
ct.synchronize()
one, two = ct.Stream(), ct.Stream()
half = N // 2
with ct.stream(one):
    x[:half].get(down, blocking=False)  # @down
with ct.stream(two):
    start = half if sys.argv[1] == "fixed" else half - 1
    x[start : start + half].copy_(up, non_blocking=True)  # @up
ct.synchronize()
