"""Calls a function when PyTorch's caching allocator has no memory, before the program gets the exception."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from time import time_ns
from types import FrameType, ModuleType
from typing import Any

from cudatool.collect.torch_history import TorchHistory
from cudatool.files import replacing
from cudatool.loading.after_import import AfterImport

__all__ = ["TorchFailures"]

_log = logging.getLogger("cudatool.collect")


class TorchFailures:
    """Watches PyTorch's allocator, from its import or from now if it is imported already, until :meth:`stop`.

    The observer is the one of PyTorch's own examples: it runs on the thread of the request, with the allocator's lock
    released, and cannot be detached; after :meth:`stop` it does nothing.

    Parameters
    ----------
    failed
        Called with device, bytes requested, bytes allowed, bytes free.
    history_share
        Let PyTorch keep the history of its allocator until :meth:`stop`, for snapshots, unless it does already: for as
        much of the time as costs this share of it (:class:`TorchHistory`). 0 for no history.
    """

    def __init__(self, failed: Callable[[int, int, int, int], None], *, history_share: float = 0.0) -> None:
        self._failed: Callable[[int, int, int, int], None] | None = failed
        self._history_share = history_share
        self._torch: Any = None
        self._history: TorchHistory | None = None
        self._event: tuple[int, dict[str, Any]] | None = None  # a device, and its failure as snapshots have it
        self._finder = AfterImport({"torch": self._watch})

    def start(self) -> None:
        """Begin to watch."""
        self._finder.start()

    def stop(self) -> None:
        """Call the function no longer. Stopping again changes nothing."""
        self._finder.stop()
        self._failed = None
        if self._history is not None:
            self._history.stop()

    @property
    def is_watching(self) -> bool:
        """Whether PyTorch's CUDA is in use and watched."""
        return self._torch is not None and self._failed is not None

    def dump(self, path: str) -> None:
        """Write PyTorch's snapshot of its allocator to a file; with the failure, which it lacks without a history.

        Raises
        ------
        OutputError
            It cannot be written.
        """
        snapshot = self._torch.cuda.memory._snapshot()
        if self._event is not None:
            device, event = self._event
            events = snapshot["device_traces"][device]
            if not any(one["action"] == "oom" and one["size"] == event["size"] for one in events):
                # Another thread's events may be later by now, or told by another clock.
                events.append(event | {"time_us": max([event["time_us"], *(one["time_us"] for one in events[-1:])])})
        if self._history is not None:
            snapshot["history_kept"] = self._history.kept
        with replacing(path) as name, open(name, "wb") as file:
            pickle.dump(snapshot, file)

    def _watch(self, torch: ModuleType) -> None:
        if torch.version.cuda:
            torch.cuda._lazy_call(lambda: self._attach(torch))  # once its CUDA is initialized, or now if it is

    def _attach(self, torch: Any) -> None:
        if self._failed is None:
            return
        try:
            torch._C._cuda_attach_out_of_memory_observer(self._observe)
            self._torch = torch
            if self._history_share and not torch._C._cuda_isHistoryEnabled():
                self._history = TorchHistory(torch, self._history_share)
        except Exception as error:  # an allocator that is not the caching one, or another PyTorch: not the program's
            _log.warning("out-of-memory reports do not know PyTorch: %s", str(error).partition("\n")[0])

    def _observe(self, device: int, requested: int, allowed: int, free: int) -> None:
        if self._failed is None:
            return
        event = {
            "action": "oom",
            "size": requested,
            "device_free": free,
            "stream": 0,
            "time_us": time_ns() // 1000,
            "frames": _frames(sys._getframe().f_back),  # None in a thread of autograd's
        }
        self._event = device, event
        self._failed(device, requested, allowed, free)


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """Return this frame and those outside of it as PyTorch's snapshots have them, innermost first."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return found
