"""Python functions that a stream calls when it gets there: what stands for machine code on the software device.

Device memory of the software device lies in the address space of the process, so that NumPy can compute in it; but only
in stream order, which a host function gives. One that was enqueued is called once; one that was captured is called at
every launch of its graph, which keeps it.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from cudatool.runtime import calls
from cudatool.runtime.allocator import Layout
from cudatool.runtime.calls import check
from cudatool.runtime.capture import is_capturing
from cudatool.runtime.extents import Extent, emit_extents
from cudatool.runtime.stream import Stream
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind

__all__ = ["address", "enqueue", "repeat", "repeatable", "unowned"]

_Access = tuple[list[Extent], AccessFlag]

repeatable = False
"""Whether functions that were called are kept, to be called again."""

_log = logging.getLogger("cudatool.host_function")
_once: dict[int, Callable[[], object]] = {}
_captured: dict[int, Callable[[], object]] = {}
_done: dict[int, Callable[[], object]] = {}
_keys = itertools.count(1)


def enqueue(function: Callable[[], object], stream: Stream, accesses: Callable[[], Sequence[_Access]] = tuple) -> None:
    """Let the stream call `function`; the caller has opened an operation and made the stream's device current.

    `function` must not use the driver. What it raises is logged. If it is captured, `accesses` is asked what it
    touches, which is reported at each launch of the graph.
    """
    handle, key = stream.core.handle, next(_keys)
    driver = calls.driver
    if is_capturing(stream):
        _captured[key] = _reporting(function, accesses(), stream.device_index)
        _let_graph_keep(check(driver.cuStreamGetCaptureInfo(handle))[2], key)
    else:
        _once[key] = function
    check(driver.cuLaunchHostFunc(handle, address, key))


def _reporting(function: Callable[[], object], accesses: Sequence[_Access], device: int) -> Callable[[], object]:
    """Return `function` with a report, for the node of the graph that calls it, of what it touches."""

    def call_and_report() -> None:
        function()
        correlation, node = hooks.running_function()
        if correlation and hooks.active:
            for parts, mode in accesses:
                emit_extents(Kind.ACCESS, parts, mode, device=device, correlation=correlation, stream=node)

    return call_and_report


def _let_graph_keep(graph: object, key: int) -> None:
    """Forget a captured function when nothing can launch it any more: the graph, and what was made of it."""
    driver = calls.driver
    no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    owner = check(driver.cuUserObjectCreate(key, driver.CUhostFn(_forget_address), 1, no_sync))
    moved = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    check(driver.cuGraphRetainUserObject(graph, owner, 1, moved))


def unowned(layout: Layout) -> Layout:
    """Return the same memory without what keeps it: dropped, it goes back to the allocator at once, as on a GPU."""
    # As bytes, because the interface has no name for the types of ml_dtypes.
    interface = {
        "version": 3,
        "shape": layout.shape,
        "typestr": f"|V{layout.itemsize}",
        "data": (layout.ctypes.data, False),
        "strides": layout.strides,
    }
    return np.asarray(type("Unowned", (), {"__array_interface__": interface})()).view(layout.dtype)


@np.errstate(all="ignore")  # a GPU computes infinities and NaN without a word
def _call(key: int) -> None:
    try:
        function = _captured[key] if key in _captured else _once.pop(key)
        if repeatable:
            _done[key] = function
        function()
    except Exception:  # must not reach the driver, which is C
        _log.exception("a function failed in a stream of the software device")


@np.errstate(all="ignore")
def repeat(key: int) -> None:
    """Call a function again; `key` is the argument of the host function."""
    _done[key]()


def _forget(key: int) -> None:
    _captured.pop(key, None)


_Callback: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_callback: Final = _Callback(_call)
address: Final = ctypes.cast(_callback, ctypes.c_void_p).value or 0
"""Of the host function that calls them."""
_forget_callback: Final = _Callback(_forget)
_forget_address: Final = ctypes.cast(_forget_callback, ctypes.c_void_p).value or 0
