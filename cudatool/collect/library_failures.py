"""Calls a function when CuPy or JAX has no memory, before the program gets the exception.

Neither library offers an observer. Both make an object of one class of exceptions for each request that failed, after
they have given back all that they could, so the making of such an object is what is noted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, Final

from cudatool.collect.replaced import Replaced
from cudatool.loading.after_import import AfterImport
from cudatool.trace import hooks
from cudatool.trace.events import FREE_UNKNOWN, Kind
from cudatool.trace.libraries import Library

__all__ = ["LibraryFailures", "bytes_requested"]

_RESOURCE_EXHAUSTED: Final = 8  # absl::StatusCode
_PREFIX: Final = "RESOURCE_EXHAUSTED:"
_REQUEST: Final = re.compile(r"allocat(?:e|ing) ([\d.]+) ?(bytes|[KMGTP]iB)\b")
_UNITS: Final = {"bytes": 1, **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGTP", 1)}}
_ON_GPU: Final = ("jax_cuda", "jax_plugins.xla_cuda")
"""How the modules are called that let JAX use a GPU."""


class LibraryFailures:
    """Watches CuPy and JAX, each from its import or from now if it is imported already, until :meth:`stop`.

    Each failure is an event, ``LIBRARY_OOM``, too.

    Parameters
    ----------
    failed
        Called with device, bytes requested, bytes allowed (0: not known), bytes free (0: not known).
    """

    def __init__(self, failed: Callable[[int, int, int, int], None]) -> None:
        self._failed = failed
        self._replaced = Replaced()
        self._finder = AfterImport({"cupy.cuda.memory": self._watch_cupy, "jax": self._watch_jax})

    def start(self) -> None:
        """Begin to watch."""
        self._finder.start()

    def stop(self) -> None:
        """Call the function no longer. Stopping again changes nothing."""
        self._finder.stop()
        self._replaced.put_back()

    def _watch_cupy(self, memory: ModuleType) -> None:
        def note(error: Any, size: int, total: int, limit: int = 0) -> None:
            runtime = sys.modules["cupy"].cuda.runtime
            device, (free, _) = runtime.getDevice(), runtime.memGetInfo()
            self._note(Library.CUPY, device, size, limit, free)

        self._watch(getattr(memory, "OutOfMemoryError", None), note)

    def _watch_jax(self, jax: ModuleType) -> None:
        def note(error: BaseException, message: Any = "", code: int | None = None, *more: Any) -> None:
            is_full = code == _RESOURCE_EXHAUSTED if code is not None else str(message).startswith(_PREFIX)
            if is_full and any(name.startswith(_ON_GPU) for name in list(sys.modules)):
                # JAX names neither a device nor what it has free; asking may wait for a lock that this thread holds.
                self._note(Library.JAX, 0, bytes_requested(str(message)), 0, None)

        self._watch(getattr(getattr(jax, "errors", None), "JaxRuntimeError", None), note)

    def _watch(self, error: type[BaseException] | None, note: Callable[..., None]) -> None:
        if error is None:  # another version: its failures leave no report
            return
        made: Callable[..., None] = error.__init__

        @wraps(made, assigned=())  # a constructor of an extension may have attributes that no function can have
        def make(self: BaseException, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            note(self, *args, **kwargs)

        self._replaced.replace(error, "__init__", make)

    def _note(self, library: Library, device: int, size: int, limit: int, free: int | None) -> None:
        if hooks.active:
            flags = FREE_UNKNOWN if free is None else 0
            hooks.emit(
                Kind.LIBRARY_OOM, device=device, size=size, aux0=free or 0, aux1=limit, flags=flags, name=library
            )
        self._failed(device, size, limit, free or 0)


def bytes_requested(message: str) -> int:
    """Return how much JAX says that it could not allocate, 0 if it does not say."""
    found = _REQUEST.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0
