"""NVIDIA's bindings for the rest of the runtime: loaded at first use, with their errors turned into ours.

``_cuda.driver`` is :mod:`cuda.bindings.driver`, ``_cuda.core`` is :mod:`cuda.core`. The first look at either chooses
the device (:func:`cudatool._driver.initialize`). No other module knows how NVIDIA's packages report errors.
"""

from __future__ import annotations

import functools
import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from cudatool import _driver
from cudatool.errors import CompileError, CudaError, OutOfMemoryError
from cudatool.loading.whole_imports import whole_imports
from cudatool.trace import hooks

if TYPE_CHECKING:
    core: Any
    driver: Any

__all__ = ["check", "core", "driver", "entry", "operation", "raise_status"]

_ADVICE: Final = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "the context cannot be used again; fix the access and restart",
    "CUDA_ERROR_NOT_READY": "the work it asks about has not completed; synchronize first",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "a stream is being captured into a graph: captured work does not "
    "run yet, so it cannot be waited for or queried; do this before or after the capture, which has failed now",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "a call during the capture was not allowed, and its own error says why; "
    "the capture gives no graph",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "a stream that takes part in the capture was not waited for; let the stream "
    "that is captured wait for it (wait_stream) before the end",
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "what is captured cannot wait for work outside of the capture; wait for it "
    "before the capture begins",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "the default stream waits for every blocking stream, and one is being "
    "captured; capture a stream of cudatool's, or do this on another stream than the default one",
    "CUDA_ERROR_CAPTURED_EVENT": "the event was recorded in a stream that was being captured, so it has no work "
    "to wait for; record it again outside of the capture",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the NVIDIA driver is older than the installed NVRTC; update the driver",
}

_loading = threading.RLock()


def __getattr__(name: str) -> Any:
    if name not in ("core", "driver"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _loading:  # cuda.core stands in for a package of its own: a second thread would find it half imported
        _driver.initialize()  # before anything loads libcuda
        with whole_imports():
            from cuda import core
            from cuda.bindings import driver

        check(driver.cuInit(0))
        _driver.initialized()
        globals().update(core=core, driver=driver)
    return globals()[name]


def _forked() -> None:
    """In a forked child: look at the driver again, which says whether it can be used here."""
    global _loading
    if not _loading.acquire(blocking=False):
        _driver.in_fork()  # a thread of the parent held it: what it had half imported cannot be imported here
    _loading = threading.RLock()
    globals().pop("core", None)
    globals().pop("driver", None)


os.register_at_fork(after_in_child=_forked)


def check(result: tuple[Any, ...]) -> Any:
    """Return what a function of :mod:`cuda.bindings.driver` returned beside its status.

    Raises
    ------
    CudaError
        The status is not CUDA_SUCCESS.
    """
    status, *values = result
    if status:
        raise _error(status.name, _driver.last_message())
    return values[0] if len(values) == 1 else tuple(values) or None


def raise_status(status: int) -> NoReturn:
    """Raise the error that a driver function's status stands for.

    Raises
    ------
    CudaError
        Always.
    """
    raise _error(__getattr__("driver").CUresult(status).name, _driver.last_message())


def _error(name: str, text: str = "") -> CudaError:
    if not text:
        from cuda.bindings import driver

        status, description = driver.cuGetErrorString(getattr(driver.CUresult, name))
        text = description.decode() if not status and description else "the driver gives no description"
    if name in _ADVICE:
        text = f"{text}; {_ADVICE[name]}"
    return OutOfMemoryError(text) if name == "CUDA_ERROR_OUT_OF_MEMORY" else CudaError(text, name)


@functools.cache
def entry(name: str) -> int:
    """Return the address of a function of the driver, for :mod:`cudatool.runtime._native`."""
    address, _ = check(__getattr__("driver").cuGetProcAddress(name.encode(), _DRIVER_VERSION, 0))
    return int(address)


_DRIVER_VERSION: Final = 12000  # as of which the functions are wanted


class operation:  # noqa: N801 - reads as a statement
    """One operation of the runtime, from the hooks' view; also turns the bindings' errors into ours.

    ::

        with operation() as correlation:    # 0 without a subscriber
            driver call
        if correlation:
            hooks.emit(...)

    An event that must come before the work's own (:data:`~cudatool.trace.events.Kind.EXECUTION`) is emitted inside,
    before the call, if the call may do the work at once.
    """

    __slots__ = ("_correlation",)

    def __enter__(self) -> int:
        self._correlation = hooks.begin() if hooks.active else 0
        return self._correlation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._correlation:
            hooks.end()
        if error is not None:
            _translate(error)


def _translate(error: BaseException) -> None:
    """Raise our error for one of cuda.core's; do nothing for any other."""
    # Private in cuda.core (1.2), which has no public name for them.
    from cuda.core._utils.cuda_utils import CUDAError, NVRTCError

    if isinstance(error, NVRTCError):
        reason, _, log = str(error).partition(", compilation log:")
        raise CompileError(f"the program does not compile ({reason})", log.strip(" \n\0")) from error
    if isinstance(error, CUDAError):
        name, _, text = str(error).partition(": ")
        if not name.startswith("CUDA_"):  # cuda.core's own, with no name
            raise CudaError(str(error)) from error
        raise _error(name, text) from error
