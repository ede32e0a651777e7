"""The input of a CUDA graph is filled on a side stream; the graph is launched with or without waiting for that."""

import sys

import torch

static = torch.zeros(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = static * 2
side = torch.cuda.Stream()
for step in range(3):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.fill_(step)
    if sys.argv[1] == "clean":
        torch.cuda.current_stream().wait_stream(side)
    graph.replay()
print(result.sum().item())
torch.cuda.synchronize()
