"""Compare the stacks that memory of PyTorch's backward pass gets with those of PyTorch's anomaly mode.

python torch_nodes.py LIBCUPTI SEED

A program of random operators, views, in-place operators, functions of its own, checkpoints and threads runs backward.
For each operator that a node of the backward graph calls, anomaly mode knows the stack of the forward operator.
"""

from __future__ import annotations

import random
import re
import sys
import threading
from typing import Any

import torch
from drained import drained
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cudatool.collect import _cupti
from cudatool.collect.torch_build import load

libcupti, seed = sys.argv[1:]
extension = load(torch, "torch_blocks")
_cupti.open(libcupti)
_cupti.start({"cuEventRecord": ("qq", False, False, False, 0, False)}, 1 << 20)
assert extension.start(_cupti.log), "autograd's nodes are not seen"
draw = random.Random(int(seed))
checked: list[tuple[str, int, list[tuple[str, int]]]] = []
line = re.compile(r'  File "(.*)", line (\d+), in ')


class Backward(TorchDispatchMode):
    """Notes the stack that memory gets which the running operator takes, and the truth."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None and "AccumulateGrad" not in node.name():  # which belongs to no operator
            truth = [(found[1], int(found[2])) for text in node.metadata["traceback_"] if (found := line.match(text))]
            checked.append((f"{func} in {node.name()}", extension.stack(), truth[::-1]))
        return func(*args, **(kwargs or {}))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 + x * 0


linear, norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
conv = torch.nn.Conv1d(8, 8, 1)


def inner(x: torch.Tensor) -> torch.Tensor:
    x = x.relu()
    return x + x.sum(0, keepdim=True)


def step(x: torch.Tensor, depth: int = 0) -> torch.Tensor:
    way = draw.randrange(14)
    if way == 0:
        return linear(x)
    if way == 1:
        return norm(x).mul_(2)
    if way == 2:
        return Scaled.apply(x)
    if way == 3:
        return x.t().contiguous().t() if x.dim() == 2 else x
    if way == 4:
        return torch.cat([x[:4], x[4:] * 2])
    if way == 5 and depth < 2:
        return checkpoint(inner, x, use_reentrant=bool(draw.randrange(2)))
    if way == 6:
        return torch.nn.functional.relu(x + 1, inplace=True)
    if way == 7:
        return x.expand(3, *x.shape).mean(0)
    if way == 8:
        return torch.nn.functional.dropout(x, 0.5)
    if way == 9:
        return torch.nn.functional.softmax(x, -1)
    if way == 10 and depth < 3:
        return step(step(x, depth + 1), depth + 1)
    if way == 11:
        return conv(x.t()[None])[0].t()
    if way == 12:
        return torch.stack([part * 1.5 for part in x.unbind()])
    return inner(x)


def work(rounds: int) -> None:
    for number in range(rounds):
        x = torch.randn(8, 8, requires_grad=True)
        y = x
        for _ in range(12):
            y = step(y)
        with Backward():
            if number % 5:
                y.square().sum().backward()
            else:
                y.square().sum().backward(create_graph=True)
                if x.grad is not None and x.grad.requires_grad:
                    x.grad.sum().backward()


with torch.autograd.set_detect_anomaly(True, check_nan=False):
    work(25)
    threads = [threading.Thread(target=work, args=(10,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

stack_of = drained(libcupti)
wrong = 0
for what, number, truth in checked:
    found = stack_of(number)
    if found != truth:
        wrong += 1
        if wrong < 5:
            print(what, "\n  found", found[:4], "\n  truth", truth[:4])
print(len(checked), "operators of", len({what for what, *_ in checked}), "kinds,", wrong, "wrong")
extension.stop()
sys.exit(bool(wrong) or len(checked) < 1000)
