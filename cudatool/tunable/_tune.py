"""Trying the candidates for a product: are they right, and how long do they take?"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.blas._gemm import BFLOAT16, Compute, Gemm
from cudatool.errors import CudatoolError
from cudatool.runtime.allocator import allocate
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.device import get_device_properties
from cudatool.runtime.event import Event
from cudatool.runtime.stream import Stream
from cudatool.runtime.transfer import copy_on_device
from cudatool.tunable._candidates import Enqueue, candidates
from cudatool.tunable._results import Result

__all__ = ["Limits", "Tolerances", "fastest"]

_TOLERANCES: Final = {
    # dtype -> how much results may differ, as a part of the largest
    np.dtype(np.float16): 1e-2,
    BFLOAT16: 3e-2,
    np.dtype(np.float32): 1e-4,
    np.dtype(np.complex64): 1e-4,
    np.dtype(np.float64): 1e-10,
    np.dtype(np.complex128): 1e-10,
}
_TF32_TOLERANCE: Final = 1e-2
_HOPELESS: Final = 2  # times as long as the fastest, at the first try
_MIB: Final = 1 << 20
_MOST_COPIES: Final = 64


class Limits(NamedTuple):
    """How long a candidate is tried: until either the iterations or the milliseconds are used up, once at least.

    Attributes
    ----------
    warmup_iterations, warmup_ms
        Before it is timed.
    rotating_mib
        Size of the operands that take turns, so that they are not always found in the cache: the L2 cache's if
        negative; 0 for no turns.
    """

    iterations: int
    duration_ms: int
    warmup_iterations: int
    warmup_ms: int
    rotating_mib: int


class Tolerances(NamedTuple):
    """How much the result of a candidate may differ from the default's: `atol` and `rtol` of its size, if `is_checked`.

    The library's own tolerances depend on the dtype, and are parts of the largest element.
    """

    is_checked: bool
    atol: float
    rtol: float


def fastest(gemm: Gemm, stream: Stream, limits: Limits, tolerances: Tolerances | None = None) -> Result:
    """Return which candidate is the fastest for a product, of those that give the same result as the default.

    The operands are read, and copies of them; the result's place is not written. `tolerances` are the program's, in
    place of the library's own.
    """
    place = _copy_of(gemm.out, stream)
    turns = _turns(gemm._replace(out=place), stream, limits.rotating_mib)
    expected: Any = None
    best: Result | None = None
    for name, enqueue in candidates(gemm, stream):
        copy_on_device(place.layout, gemm.out.layout, stream)
        try:
            enqueue(turns[0], stream)
            found = place.get()
        except CudatoolError:
            if expected is None:  # the default itself
                raise
            continue
        if expected is None:
            expected = found
        elif not _is_close(found, expected, gemm.compute, tolerances):
            continue
        milliseconds = _measured(enqueue, turns, stream, limits, math.inf if best is None else best.milliseconds)
        if best is None or milliseconds < best.milliseconds:
            best = Result(name, milliseconds)
    assert best is not None
    return best


def _measured(enqueue: Enqueue, turns: list[Gemm], stream: Stream, limits: Limits, to_beat: float) -> float:
    once = _milliseconds(enqueue, turns, stream, 1)
    if once > _HOPELESS * to_beat:
        return once
    warmup = _iterations(limits.warmup_iterations, limits.warmup_ms, once)
    if warmup:
        once = _milliseconds(enqueue, turns, stream, warmup)
    return _milliseconds(enqueue, turns, stream, max(1, _iterations(limits.iterations, limits.duration_ms, once)))


def _iterations(iterations: int, duration_ms: int, once_ms: float) -> int:
    """Return how often a candidate runs within a limit of which 0 means that it is none, unless both are."""
    by_time = int(duration_ms / max(once_ms, 1e-6))
    return min(iterations, by_time) if iterations and duration_ms else iterations or by_time


def _milliseconds(enqueue: Enqueue, turns: list[Gemm], stream: Stream, count: int) -> float:
    """Return the mean time of `count` products in a row."""
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    start.record(stream)
    for index in range(count):
        enqueue(turns[index % len(turns)], stream)
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / count


def _turns(gemm: Gemm, stream: Stream, rotating_mib: int) -> list[Gemm]:
    """Return the product, and others of copies of its operands, as many as fill the rotating buffer."""
    cache = int(get_device_properties(stream.device_index).L2_cache_size)
    room = cache if rotating_mib < 0 else rotating_mib * _MIB
    size = gemm.a.nbytes + gemm.b.nbytes + gemm.out.nbytes
    more = min(-(-room // size) - 1 if room > size else 0, _MOST_COPIES - 1)
    copies = ([_copy_of(array, stream) for array in (gemm.a, gemm.b, gemm.out)] for _ in range(more))
    return [gemm, *(gemm._replace(a=a, b=b, out=out) for a, b, out in copies)]


def _copy_of(array: DeviceArray, stream: Stream) -> DeviceArray:
    """Return a copy with the same strides, gaps and all."""
    layout = array.layout
    low, high = np.lib.array_utils.byte_bounds(layout)
    room, _ = allocate(-(-(high - low) // layout.itemsize), layout.dtype, stream)
    copy = np.lib.stride_tricks.as_strided(room, layout.shape, layout.strides)
    copy_on_device(copy, layout, stream)
    return DeviceArray(copy, None, array.device)


def _is_close(found: Any, expected: Any, compute: Compute, tolerances: Tolerances | None) -> bool:
    if tolerances is not None:
        wide = "c16" if expected.dtype.kind == "c" else "f8"
        close = np.isclose(found.astype(wide), expected.astype(wide), rtol=tolerances.rtol, atol=tolerances.atol)
        return not tolerances.is_checked or bool(close.all())
    tolerance = _TF32_TOLERANCE if compute is Compute.TF32 else _TOLERANCES[expected.dtype]
    exact = "c16" if expected.dtype.kind == "c" else "f8"
    wanted = expected.astype(exact)
    largest = float(np.abs(wanted).max(initial=0))
    return bool((np.abs(found.astype(exact) - wanted) <= tolerance * largest).all())
