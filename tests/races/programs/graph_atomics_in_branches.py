# race corpus
# rule = "Branches of a graph may update the same bytes atomically; who reads them comes behind all of them"
# source = "CUDA Programming Guide, C++ Language Extensions, Atomic Functions; CUDA Graphs"
# [expect]
# racy = [["race-raw", "update", "read"]]
# fixed = []
# ---
import sys

from race_kernels import N, add_atomically, copy

import cudatool as ct

x, y = ct.zeros(N), ct.zeros(N)
ct.synchronize()
sides, graph = [ct.Stream() for _ in range(3)], ct.CUDAGraph()
with ct.graph(graph):
    main = ct.current_stream()
    for side in sides:
        side.wait_stream(main)
        add_atomically(side, x)  # @update
    if sys.argv[1] == "racy":
        copy(main, y, x)  # @read
    for side in sides:
        main.wait_stream(side)
    if sys.argv[1] == "fixed":
        copy(main, y, x)  # @read
for _ in range(2):
    graph.replay()
ct.synchronize()
