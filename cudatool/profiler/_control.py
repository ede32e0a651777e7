"""Profiler control."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cudatool.runtime.cudart import check_error, cudart
from cudatool.runtime.ranges import range
from cudatool.runtime.traced_calls import traced

__all__ = ["profile", "start", "stop"]


@traced
def start() -> None:
    """Let a profiler (Nsight Systems with ``--capture-range=cudaProfilerApi``, for one) collect from now on.

    Raises
    ------
    CudaError
        The driver refuses.
    """
    check_error(cudart().cudaProfilerStart())


@traced
def stop() -> None:
    """Let a profiler collect no more."""
    check_error(cudart().cudaProfilerStop())


@traced
@contextmanager
def profile() -> Iterator[None]:
    """Context manager: let a profiler collect inside, which is the range ``profile`` of cudatool's traces."""
    start()
    try:
        with range("profile"):
            yield
    finally:
        stop()
