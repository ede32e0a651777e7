"""Memory that cuBLAS works in: its size, as PyTorch reads it from the environment, and one block for each stream."""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cudatool.backends._settings import settings
from cudatool.errors import UsageError
from cudatool.runtime.allocator import Memory
from cudatool.runtime.device import get_device_properties
from cudatool.runtime.stream import Stream
from cudatool.runtime.traced_calls import traced
from cudatool.text import printable, shortened

__all__ = [
    "check_deterministic",
    "clear_workspaces",
    "generation",
    "new_workspace",
    "scoped",
    "scoped_workspaces",
    "size_of_workspace",
    "workspace",
    "workspace_size",
]

_DETERMINISTIC: Final = (":4096:8", ":16:8")
_KIB: Final = 1024
_DIGITS: Final = 12  # more than the memory of any device
_HOPPER: Final = 9  # major compute capability
_DEFAULT: Final = (2 * 4096 + 8 * 16) * _KIB
_DEFAULT_SINCE_HOPPER: Final = 8 * 4096 * _KIB

_blocks: dict[tuple[int, int, int], Memory] = {}
generation = 0
"""Counts how often the blocks were given back: a handle that had one before has it no more."""


def workspace_size(config: str | None, capability: int) -> int:
    """Return bytes of a workspace.

    Parameters
    ----------
    config
        ``CUBLAS_WORKSPACE_CONFIG``: ``:SIZE:COUNT``, repeated, with sizes in KiB. None is the default: 8.1 MiB, and
        32 MiB from Hopper on.
    capability
        Major compute capability of the device.
    """
    default = _DEFAULT_SINCE_HOPPER if capability >= _HOPPER else _DEFAULT
    if config is None:
        return default
    parts = re.findall(r":([0-9]+):([0-9]+)", config)
    if not parts or any(len(number) > _DIGITS for part in parts for number in part):
        warnings.warn(
            f"CUBLAS_WORKSPACE_CONFIG={shortened(printable(config[:60]), 60)} is not :SIZE:COUNT, repeated; "
            f"{default} bytes are used",
            stacklevel=2,
        )
        return default
    return sum(int(size) * int(count) for size, count in parts) * _KIB


@functools.cache
def _size(device: int) -> int:
    return workspace_size(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), get_device_properties(device).major)


def workspace(handle: int, stream: Stream) -> Memory:
    """Return the memory in which products of a handle on a stream work; it stays theirs until it is cleared."""
    key = (stream.device_index, handle, stream.cuda_stream)
    found = _blocks.get(key)
    if found is None:
        found = _blocks[key] = new_workspace(stream)
    return found


def new_workspace(stream: Stream) -> Memory:
    """Return memory for products on a stream, for as long as it is held."""
    return Memory(_size(stream.device_index), stream)


def size_of_workspace(stream: Stream) -> int:
    """Return bytes of the workspaces of a stream."""
    return _size(stream.device_index)


class _Scoped(threading.local):
    now = False


scoped: Final = _Scoped()
"""Whether each product of this thread takes its workspace for itself."""


@contextmanager
def scoped_workspaces() -> Iterator[None]:
    """Let each product of this thread take memory to work in, and give it back: for code that runs once."""
    before, scoped.now = scoped.now, True
    try:
        yield
    finally:
        scoped.now = before


@traced
def clear_workspaces() -> None:
    """Give the memory in which products work back to the allocator. They take new memory when they are called again."""
    global generation
    generation += 1
    _blocks.clear()


def check_deterministic() -> None:
    """Raise, or warn, if products must be deterministic and the size of the workspaces lets cuBLAS choose.

    Raises
    ------
    UsageError
        ``CUBLAS_WORKSPACE_CONFIG`` is neither ``:4096:8`` nor ``:16:8``.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") in _DETERMINISTIC:
        return
    text = (
        "products of cuBLAS may differ from run to run, and use_deterministic_algorithms was called; set "
        "CUBLAS_WORKSPACE_CONFIG to :4096:8 or :16:8 before the program starts"
    )
    if not settings.deterministic_warn_only:
        raise UsageError(text)
    warnings.warn(text, stacklevel=3)
