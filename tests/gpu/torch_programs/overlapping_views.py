"""Two streams update column ranges of one matrix: ranges that share columns, or two halves that share none."""

import sys

import torch

last, first = (600, 500) if sys.argv[1] == "racy" else (512, 512)
matrix = torch.zeros(1024, 1024, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    matrix[:, :last].add_(1)
matrix[:, first:].mul_(2)
torch.cuda.current_stream().wait_stream(side)
print(matrix.sum().item())
