# race corpus
# rule = "In a capture, too, a block of a side stream is free for that stream's next request as soon as it is dropped"
# source = "torch.Tensor.record_stream; torch.cuda, CUDA graphs; Programming Guide, CUDA Graphs, Cross-stream Dependencies"
# [expect]
# racy = [["race-war", "read", "next"]]
# fixed = []
# waited = []
# ---
import sys

from race_kernels import N, copy, fill

import cudatool as ct

y, side, graph = ct.zeros(N), ct.Stream(), ct.CUDAGraph()
with ct.graph(graph):
    main = ct.current_stream()
    side.wait_stream(main)
    with ct.stream(side):
        x = ct.empty(N)
        fill(side, x)
    main.wait_stream(side)
    copy(main, y, x)  # @read
    if sys.argv[1] == "fixed":
        x.record_stream(main)
    if sys.argv[1] == "waited":
        side.wait_stream(main)
    x = None
    with ct.stream(side):
        z = ct.empty(N)
        fill(side, z, 2.0)  # @next
    main.wait_stream(side)
graph.replay()
ct.synchronize()
