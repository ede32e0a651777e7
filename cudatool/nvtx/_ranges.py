"""The public functions: each tells NVTX and, while hooks have subscribers, the trace.

A trace may record all calls of NVTX: then ranges do not call it, so that the trace has each once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cudatool.errors import UsageError
from cudatool.nvtx._library import Nvtx, nvtx
from cudatool.runtime.traced_calls import traced
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]


class _Open(threading.local):
    def __init__(self) -> None:
        self.ranges: list[tuple[bool, bool]] = []  # of this thread: whether NVTX, and the trace, have its beginning


_open = _Open()
_started: dict[int, tuple[Any, bool]] = {}  # NVTX's own handle, and whether the trace has the beginning
_handles = itertools.count(1)


def _library() -> Nvtx | None:
    """Return NVTX, None where this machine has none, or where it would tell the trace what we do."""
    return None if hooks.reports_ranges else nvtx()


def _message(msg: str) -> str:
    if not isinstance(msg, str):
        raise UsageError(f"a range or mark is named by a string, not {type(msg).__name__}")
    return msg


@traced
def range_push(msg: str) -> int:
    """Open a range on the calling thread, inside of those that are open, and return how many these are."""
    library, msg = _library(), _message(msg)
    if library is not None:
        library.push(msg)
    in_trace = hooks.active  # which another thread may change at any time
    if in_trace:
        hooks.emit(Kind.RANGE_PUSH, name=msg)
    _open.ranges.append((library is not None, in_trace))
    return len(_open.ranges) - 1


@traced
def range_pop() -> int:
    """Close the range that the calling thread opened last, and return how many were around it.

    As in NVTX, a negative number says that none was open.
    """
    if not _open.ranges:
        return -1
    is_nvtxs, in_trace = _open.ranges.pop()
    if is_nvtxs and (library := nvtx()) is not None:
        library.pop()
    if in_trace and hooks.active:
        hooks.emit(Kind.RANGE_POP)
    return len(_open.ranges)


@traced
def range_start(msg: str) -> int:
    """Open a range that any thread may close, in any order, and return what :func:`range_end` takes."""
    library, msg = _library(), _message(msg)
    handle, in_trace = next(_handles), hooks.active
    _started[handle] = (library.start(msg) if library is not None else None), in_trace
    if in_trace:
        hooks.emit(Kind.RANGE_START, name=msg, aux0=handle)
    return handle


@traced
def range_end(range_id: int) -> None:
    """Close a range of :func:`range_start`.

    Raises
    ------
    UsageError
        There is none, or it was closed before.
    """
    found = _started.pop(range_id, None)
    if found is None:
        raise UsageError(f"{range_id!r} is no open range; pass what range_start returned, once")
    started, in_trace = found
    if started is not None and (library := nvtx()) is not None:
        library.end(started)
    if in_trace and hooks.active:
        hooks.emit(Kind.RANGE_END, aux0=range_id)


@traced
def mark(msg: str) -> None:
    """Mark this moment."""
    library, msg = _library(), _message(msg)
    if library is not None:
        library.mark(msg)
    if hooks.active:
        hooks.emit(Kind.MARK, name=msg)


@traced
@contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Context manager and decorator: name what happens inside.

    Parameters
    ----------
    msg
        A format string for the other arguments, as for :meth:`str.format`.
    """
    range_push(_message(msg).format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
