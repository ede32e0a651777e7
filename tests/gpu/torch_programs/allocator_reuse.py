"""A tensor is freed while a side stream may still read it; with record_stream the allocator knows and waits."""

import sys

import torch

side = torch.cuda.Stream()
used = torch.ones(1 << 22, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(20):
        total = used.sum()
if sys.argv[1] == "clean":
    used.record_stream(side)
del used
other = torch.zeros(1 << 22, device="cuda")  # may get the same memory
torch.cuda.current_stream().wait_stream(side)
print(total.item(), other.sum().item())
