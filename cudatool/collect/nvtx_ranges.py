"""Records the ranges and marks that any library gives to NVTX: the package ``nvtx``, PyTorch, CuPy, NCCL, C++ code.

::

    NVTX_INJECTION64_PATH = _nvtx.so     each library's NVTX loads that at its first call, and hands its functions over
    a range                              becomes a row in the log of _cupti.c, without the interpreter's lock
    before an event of another source    the log is read: by the collector of CUPTI, or where that is not at work, here

A program that uses no NVTX pays for a variable in its environment. A library that called NVTX before the recording
began found no tool, and stays without one. Where the GPU's driver runs already, the variable is not set: libraries have
threads then that may read the environment, which the C library does not allow while another one changes it. So where
the first call of a package through which Python programs use NVTX leaves nothing in the log, the trace says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti, _nvtx
from cudatool.collect.cupti_rows import ROW
from cudatool.collect.replaced import Replaced
from cudatool.loading.after_import import AfterImport
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, Event, Kind, WarningCode, WarningFlag

__all__ = ["RangeLog", "nvtx_ranges"]

_VARIABLE: Final = "NVTX_INJECTION64_PATH"
_MOST_ROWS: Final = 1 << 20  # that wait to be read: 100 MiB
_OURS: Final = "_nvtx."  # how the file's name begins, of another version of Python's too
_FUNCTIONS: Final = {
    "nvtx.nvtx": ("libnvtx_push_range", "libnvtx_start_range", "libnvtx_mark"),
    "torch.cuda.nvtx": ("range_push", "range_start", "mark"),
    "cupy_backends.cuda.libs.nvtx": ("RangePush", "RangePushC", "Mark", "MarkC"),
}
"""By package, those of its functions by which all its other ones give something to NVTX."""
_NAMES: Final = {"nvtx.nvtx": "nvtx", "cupy_backends.cuda.libs.nvtx": "cupy.cuda.nvtx"}  # as programs know it
_LATE: Final = (
    "it used NVTX before the recording began, or the GPU's driver ran already; record the program from its start, "
    "or use cudatool.range"
)


@contextmanager
def nvtx_ranges(log: RangeLog | None, *, may_set: bool = True) -> Iterator[dict[str, str]]:
    """Have NVTX's ranges written to the log inside of the ``with`` block; yield what a trace's header says of it.

    Parameters
    ----------
    log
        What reads it; None if the collector of CUPTI does.
    may_set
        Whether the environment may be changed. Without that, libraries are recorded that an earlier recording has met.
    """
    before = os.environ.get(_VARIABLE)
    if before and not os.path.basename(before).startswith(_OURS):
        yield {"nvtx_tool": before}  # the user's
        return
    if may_set:
        os.environ[_VARIABLE] = _nvtx.__file__
    hooks.reports_ranges = True
    if log is not None:
        log.open()
    if _nvtx.start(None if log is None else log.watch) and log is not None:
        log.watch()
    first_calls = _FirstCalls()
    first_calls.start()
    try:
        yield {}
    finally:
        first_calls.stop()
        _nvtx.stop()
        if log is not None:
            log.close()
        hooks.reports_ranges = False
        if may_set and os.environ.get(_VARIABLE) == _nvtx.__file__:
            del os.environ[_VARIABLE]
            if before:
                os.environ[_VARIABLE] = before


class _FirstCalls:
    """Looks whether the first range or mark of each package reaches the log, and says if not."""

    def __init__(self) -> None:
        self._replaced = {name: Replaced() for name in _FUNCTIONS}
        self._imports = AfterImport(dict.fromkeys(_FUNCTIONS, self._watch))

    def start(self) -> None:
        """Look from now on, and at packages that are imported later, too."""
        self._imports.start()

    def stop(self) -> None:
        """Look no more."""
        self._imports.stop()
        while self._replaced:  # who has kept one of the functions calls NVTX's own from now on
            self._replaced.popitem()[1].put_back()

    def _watch(self, package: ModuleType) -> None:
        for name in _FUNCTIONS[package.__name__]:
            if hasattr(package, name):
                self._replaced[package.__name__].replace(package, name, self._around(package, getattr(package, name)))

    def _around(self, package: ModuleType, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def first_call(*args: Any, **kwargs: Any) -> Any:
            before = _nvtx.notes()
            result = function(*args, **kwargs)
            replaced = self._replaced.pop(package.__name__, None)
            if replaced is not None:
                replaced.put_back()
                if _nvtx.notes() == before:
                    text = f"ranges of {_NAMES.get(package.__name__, package.__name__)} are not recorded: {_LATE}"
                    hooks.emit(Kind.WARNING, name=text, aux0=WarningCode.RANGES_NOT_RECORDED)
            return result

        return first_call


class RangeLog:
    """Reads the log where the collector of CUPTI is not at work: on the software device, say."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = 0  # that the log is of

    def open(self) -> None:
        """Open the log."""
        _cupti.start_alone(_MOST_ROWS)
        self._process = os.getpid()

    def watch(self) -> None:
        """Pass on from now on what the log has before the event of any other source: NVTX is in use."""
        if self._process == os.getpid():
            hooks.subscribe(self, first=True)

    def close(self) -> None:
        """Pass on the rest, and close the log."""
        self.flush()
        self._process = 0
        hooks.unsubscribe(self)
        _cupti.stop()

    def flush(self) -> None:
        """Pass on what the log has."""
        with self._lock:
            drained = _cupti.drain() if self._process == os.getpid() else None
            if drained is None:
                return
            data, *_, lost, at, texts = drained
            rows = np.frombuffer(data, ROW)
            records, names = np.zeros(len(rows), RECORD), {"": 0}
            records["device"], records["time"] = -1, rows["time"]
            records["kind"], records["aux0"] = rows["words"][:, 0], rows["words"][:, 3]
            records["thread"] = [hooks.native_thread(number) for number in rows["thread"].tolist()]
            for record, (start, length) in zip(records, (rows["words"][:, 1:3]).tolist(), strict=True):
                name = texts[start - at : start - at + length].decode("utf-8", "replace")
                record["name"] = names.setdefault(name, len(names))
            hooks.forward_rows(records, list(names), source=self)
        if lost:
            text = f"{lost:,} ranges of NVTX were lost: there was no memory for them"
            hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.LOST, aux0=WarningCode.CUPTI_RECORDS_LOST)

    def __call__(self, event: Event) -> None:
        """Pass on what the log has before another source's event."""
        if _cupti.is_waiting():
            self.flush()

    def before_rows(self, rows: npt.NDArray[np.void]) -> int:
        """Pass on what the log has before these events of another source (:func:`.hooks.forward_rows`)."""
        if _cupti.is_waiting():
            self.flush()
        return len(rows)
