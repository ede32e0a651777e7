"""Launches inside and outside of PyTorch's operators: only the latter are in the log."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

import numpy as np
import torch

from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
from cudatool.collect.torch_program import TorchCollector
from cudatool.trace import hooks

_cupti.open(sys.argv[1])
_cupti.start({"cuLaunchKernel": (".", False, False, False, 0, True, True, True)}, 1 << 20)
_cupti.watch_launches(1)
driver = ctypes.CDLL(sys.argv[1])
driver.launch.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]


@torch.library.custom_op("cudatool_test::launch", mutates_args=())
def launch(x: torch.Tensor, function: int) -> torch.Tensor:
    driver.launch(function, 3, b"arguments", 9)
    if function == 3:
        raise ValueError
    return x + 1


class Launching(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        driver.launch(6, 3, b"arguments", 9)
        return gradient


def functions() -> list[int]:
    rows = np.frombuffer(_cupti.drain()[0], ROW)
    return rows["words"][rows["what"] == What.LAUNCH][:, 0].tolist()


hooks.subscribe(lambda event: None)
collector = TorchCollector(device="cpu", beside_others=True)
collector.start()
x = torch.ones(4, requires_grad=True)
driver.launch(1, 3, b"arguments", 9)
with torch.no_grad():
    launch(x, 2)
    with suppress(ValueError):
        launch(x, 3)
    driver.launch(4, 3, b"arguments", 9)
Launching.apply(x).sum().backward()  # on a thread of autograd's, or this one: no operator of PyTorch
assert functions() == [1, 4, 6]
collector.stop()
with torch.no_grad():
    launch(x, 7)
assert functions() == [7]
