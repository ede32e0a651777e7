"""The stacks that _cupti took in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from cudatool.collect import _cupti


def drained(libcupti: str) -> Callable[[int], list[tuple[str, int]]]:
    """Return what gives the frames, file and line, of a stack's number, the innermost first."""
    call_driver = ctypes.CDLL(libcupti).call_driver
    call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
    call_driver(1, 0, 0)  # without a row there is nothing to drain
    _, _, frames, stacks, *_ = _cupti.drain()

    def stack_of(number: int) -> list[tuple[str, int]]:
        keys = [frames[frame - 1] for frame in np.frombuffer(stacks[number - 1], np.uint32)[1:]] if number else []
        return [(key[4:].partition(b"\0")[0].decode(), int.from_bytes(key[:4], "little")) for key in keys]

    return stack_of
