"""The stacks that _cupti took in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from cudatool.collect import _cupti


def drained(libcupti: str) -> Callable[[int], list[tuple[str, int]]]:
    """Return what gives the frames, file and line, of a stack's number, the innermost first."""
    return drained_with_modules(libcupti)[0]


def drained_with_modules(libcupti: str) -> tuple[Callable[[int], list[tuple[str, int]]], Callable[[int], str]]:
    """Return that, and what gives the path of the module of PyTorch, empty for none."""
    call_driver = ctypes.CDLL(libcupti).call_driver
    call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
    call_driver(1, 0, 0)  # without a row there is nothing to drain
    _, _, frames, stacks, paths, *_ = _cupti.drain()

    def stack_of(number: int) -> list[tuple[str, int]]:
        keys = [frames[frame - 1] for frame in np.frombuffer(stacks[number - 1], np.uint32)[2:]] if number else []
        return [(key[4:].partition(b"\0")[0].decode(), int.from_bytes(key[:4], "little")) for key in keys]

    def module_of(number: int) -> str:
        path = np.frombuffer(stacks[number - 1], np.uint32)[1] if number else 0
        return paths[path - 1].decode().partition("\n")[0] if path else ""

    return stack_of, module_of
