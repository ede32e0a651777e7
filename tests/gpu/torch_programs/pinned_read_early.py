"""A copy to pinned memory does not block the host, which reads the memory before or after it waits."""

import sys

import torch

source = torch.ones(1 << 22, device="cuda")
host = torch.empty(1 << 22, pin_memory=True)
host.copy_(source, non_blocking=True)
if sys.argv[1] == "clean":
    torch.cuda.current_stream().synchronize()
print(host.sum().item())
torch.cuda.synchronize()
