"""A side stream fills a tensor; the default stream reads it, with or without waiting."""

import sys

import torch

tensor = torch.zeros(1 << 20, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    tensor.fill_(1)
if sys.argv[1] == "clean":
    torch.cuda.current_stream().wait_stream(side)
print((tensor * 2).sum().item())
torch.cuda.synchronize()
