"""Declaring the accesses of a call that cudatool cannot see."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from cudatool.errors import UsageError
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.extents import Extent, emit_extents, extents, extents_of
from cudatool.runtime.stream import as_stream
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Event, Kind

__all__ = ["annotate", "annotating"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MEASURED: Final = (Kind.KERNEL_LAUNCH, Kind.GRAPH_LAUNCH)  # by a device that measures accesses
_OPAQUE: Final = (*_MEASURED, Kind.GEMM, Kind.HOST_FUNCTION, Kind.COLLECTIVE)
_REPORTED: Final = (Kind.MEMCPY, Kind.MEMSET)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[_Work | None] = []  # of each block that the thread is in; None without a subscriber


_thread = _Thread()


def annotating() -> bool:
    """Return whether the calling thread is inside of :class:`annotate`, so that nothing is to be inferred."""
    return any(_thread.open)


class annotate:  # noqa: N801 - reads as a statement
    """Say what is read and written by the work that a call enqueues, for the sanitizer.

    A context manager: everything that the thread enqueues inside has these accesses, except copies, fills and kernels
    that the device itself measures. If it is not seen to enqueue anything (the library of another vendor on a GPU), the
    block counts as one operation on `stream`. ::

        with cudatool.annotate(reads=[x, weights], writes=[y[:, :10]]):
            library.transform(x, weights, y)

    And a decorator; there, arrays may be named by the parameters of the function that hold them::

        @cudatool.annotate(reads=["x"], writes=["out"])
        def transform(x, out): ...

    Parameters
    ----------
    reads, writes
        Arrays of ours, anything with ``__cuda_array_interface__`` or ``__dlpack__``, NumPy arrays in memory that the
        device can reach, :class:`cuda.core.Buffer`, or ``(address, bytes)``. Of strided arrays, the elements count and
        not what lies between. What is both read and written stands in both.
    stream
        On which the work is enqueued, if it is not seen itself; default: the current stream.
    name
        What reports call it; default: the function's name, or ``"annotated call"``.

    Raises
    ------
    UsageError
        Something is no array, or the function has no such parameter.
    """

    def __init__(
        self,
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        *,
        stream: Any = None,
        name: str = "",
    ) -> None:
        self._reads, self._writes = _several(reads, "reads"), _several(writes, "writes")
        self._stream = stream
        self._name = name

    def __enter__(self) -> None:
        work = None
        if hooks.active:
            work = _Work(
                [
                    *((part, AccessFlag.READ) for array in self._reads for part in _extents(array)),
                    *((part, AccessFlag.WRITE) for array in self._writes for part in _extents(array)),
                ]
            )
            hooks.subscribe(work)
        _thread.open.append(work)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        work = _thread.open.pop()
        if work is not None:
            hooks.unsubscribe(work)
            if not work.seen and error is None and not hooks.measures_accesses:
                work.opaque.append(self._emit_call())
            for correlation in work.opaque:
                if correlation not in work.known:
                    for part, mode in work.parts:
                        emit_extents(Kind.ACCESS, (part,), mode, correlation=correlation, stack=0)

    def _emit_call(self) -> int:
        """Record the block as an operation, and return its correlation."""
        stream, correlation = as_stream(self._stream), hooks.new_correlation()
        hooks.emit(
            Kind.KERNEL_LAUNCH,
            device=stream.device_index,
            stream=stream.trace_id(),
            correlation=correlation,
            name=self._name or "annotated call",
        )
        return correlation

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        for array in (*self._reads, *self._writes):
            if isinstance(array, str) and array not in signature.parameters:
                raise UsageError(f"{function.__qualname__} has no parameter {array!r}")

        @functools.wraps(function)
        def annotated(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not hooks.active:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            reads, writes = (
                [given.arguments[array] if isinstance(array, str) else array for array in arrays]
                for arrays in (self._reads, self._writes)
            )
            with annotate(reads, writes, stream=self._stream, name=self._name or function.__name__):
                return function(*args, **kwargs)

        return annotated


class _Work:
    """A subscriber that notes which operations the thread enqueues."""

    def __init__(self, parts: list[tuple[Extent, AccessFlag]]) -> None:
        self.parts = parts
        self.seen = False
        self.opaque: list[int] = []  # correlations of operations whose accesses are not known by themselves
        self.known: set[int] = set()  # operations whose accesses a recorder reported
        self._thread = hooks.thread_id()

    def __call__(self, event: Event) -> None:
        if event.thread != self._thread:
            return
        if event.kind in _OPAQUE:
            self.seen = True
            if not (hooks.measures_accesses and event.kind in _MEASURED):
                self.opaque.append(event.correlation)
        elif event.kind in _REPORTED:
            self.seen = True
        elif event.kind is Kind.ACCESS:
            self.known.add(event.correlation)


def _several(arrays: Iterable[Any], what: str) -> tuple[Any, ...]:
    if isinstance(arrays, str | np.ndarray | DeviceArray) or not isinstance(arrays, Iterable):
        raise UsageError(f"{what} is a list of arrays, not {type(arrays).__name__}")
    return tuple(arrays)


def _extents(array: Any) -> list[Extent]:
    """Return the bytes that something in `reads` or `writes` stands for."""
    if isinstance(array, DeviceArray):
        return extents(array.layout)
    if isinstance(array, np.ndarray):
        return extents(array)
    if isinstance(array, calls.core.Buffer):
        return [Extent(int(array.handle), int(array.size))]
    if isinstance(array, tuple):
        if len(array) == 2 and all(isinstance(number, int) and number >= 0 for number in array):
            return [Extent(*array)] if array[1] else []
        raise UsageError(f"{array!r} is not (address, bytes)")
    if hasattr(array, "element_size") and hasattr(array, "data_ptr"):  # PyTorch: also dtypes that NumPy lacks
        width = array.element_size()
        return extents_of(array.data_ptr(), array.shape, [step * width for step in array.stride()], width)
    if hasattr(array, "__cuda_array_interface__"):
        return _extents_of_interface(array.__cuda_array_interface__)
    if hasattr(array, "__dlpack__"):
        from cuda.core.utils import StridedMemoryView

        view = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
        return _extents_of_view(view)
    raise UsageError(f"{type(array).__name__} is no array: neither __cuda_array_interface__ nor __dlpack__")


def _extents_of_interface(interface: dict[str, Any]) -> list[Extent]:
    shape, dtype = interface["shape"], np.dtype(interface["typestr"])
    strides = interface.get("strides") or _contiguous(shape, dtype.itemsize)
    return extents_of(interface["data"][0], shape, strides, dtype.itemsize)


def _extents_of_view(view: Any) -> list[Extent]:
    if view.dtype is None:
        raise UsageError("the array has a dtype that NumPy does not have; give its address and bytes")
    width = view.dtype.itemsize
    strides = _contiguous(view.shape, width) if view.strides is None else [step * width for step in view.strides]
    return extents_of(view.ptr, view.shape, strides, width)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Return the strides in bytes of an array in C order."""
    strides = [itemsize]
    for count in shape[:0:-1]:
        strides.append(strides[-1] * count)
    return strides[::-1][-len(shape) :] if shape else []
