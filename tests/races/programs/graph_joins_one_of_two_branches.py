# race corpus
# rule = "A node comes behind the branches that were joined before it was captured, not behind one that is joined later"
# source = "CUDA Programming Guide, CUDA Graphs, Cross-stream Dependencies and Events"
# [expect]
# racy = [["race-raw", "right", "sum"]]
# fixed = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

x, y, total = ct.zeros(2 * N), ct.zeros(N), ct.zeros(2 * N)
left, right, graph = ct.Stream(), ct.Stream(), ct.CUDAGraph()
with ct.graph(graph):
    main = ct.current_stream()
    left.wait_stream(main), right.wait_stream(main)
    fill(left, x[:N])
    fill(right, x[N:])  # @right
    fill(right, y)
    main.wait_stream(left)
    if sys.argv[1] == "fixed":
        main.wait_stream(right)
    copy(main, total, x)  # @sum
    main.wait_stream(right)
graph.replay()  # @replay
ct.synchronize()
