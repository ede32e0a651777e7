# race corpus
# rule = "A graph may have nodes of several devices; they are ordered by its edges alone"
# source = "CUDA Programming Guide, CUDA Graphs, Cross-stream Dependencies and Events"
# devices = 2
# [expect]
# racy = [["race-raw", "write", "copy"]]
# fixed = []
# ---
import sys

from race_kernels import N, fill

import cudatool as ct

ct.enable_peer_access(0, 1), ct.enable_peer_access(1, 0)
x, y = ct.zeros(N, device=0), ct.zeros(N, device=1)
ct.synchronize(0), ct.synchronize(1)
main, other, graph = ct.Stream(0), ct.Stream(1), ct.CUDAGraph()
with ct.graph(graph, stream=main):
    other.wait_stream(main)
    fill(main, x)  # @write
    if sys.argv[1] == "fixed":
        other.wait_stream(main)
    with ct.device(1), ct.stream(other):
        fill(other, y)
        other_copy = ct.compile(
            'extern "C" __global__ void take(float *y, const float *x) { y[threadIdx.x] += x[threadIdx.x]; }', "take"
        )
        ct.launch(other, ct.LaunchConfig(grid=1, block=128), other_copy, y, x)  # @copy
    main.wait_stream(other)
graph.replay()
ct.synchronize(0), ct.synchronize(1)
