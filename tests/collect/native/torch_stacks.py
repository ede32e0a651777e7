"""Operators have the stacks that Python has, where the driver's log numbers them as where it does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import torch

from cudatool.collect import _cupti
from cudatool.collect.torch_program import TorchCollector
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Event, Kind

x = torch.ones(8)


class Layer(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 2 + 1


def recurse(depth: int) -> torch.Tensor:
    if depth:
        return recurse(depth - 1) + depth
    return x.neg()


def generated(count: int) -> Iterator[torch.Tensor]:
    for index in range(count):
        yield x * index


def work() -> None:
    layers = torch.nn.Sequential(Layer(), Layer())
    for _ in range(3):
        layers(x)
        layers[0](x), layers[1](x)
    recurse(5), recurse(40), recurse(5)
    list(generated(3)), [x + index for index in range(3)]
    sorted([3, 1, 2], key=lambda value: float((x - value).sum()))
    for line in range(4):  # each has code of its own, which is destroyed before the next
        exec(compile("\n" * line + "def made(): return x.exp()\nmade()", "made.py", "exec"), {"x": x})
    thread = threading.Thread(target=recurse, args=[3])
    thread.start()
    thread.join()


def watched(*, beside_others: bool) -> list[tuple[str, tuple[stacks.Frame, ...]]]:
    events: list[Event] = []
    hooks.subscribe(events.append)
    collector = TorchCollector(device="cpu", beside_others=beside_others)
    collector.start()
    for _ in range(2):
        work()
    collector.flush()
    collector.stop()
    hooks.unsubscribe(events.append)
    return [(event.name, stacks.frames(event.stack)) for event in events if event.kind is Kind.KERNEL_LAUNCH]


_cupti.open(sys.argv[1])
_cupti.start({"cuEventRecord": ("qq", False, False, False, 0, False)}, 1 << 20)
alone, *beside = [watched(beside_others=beside) for beside in (False, True, True)]
assert len(alone) > 150
assert len({frames for _, frames in alone}) > 20
for again in beside:
    for expected, found in zip(alone, again, strict=True):
        assert found == expected, (expected, found)
