"""Calls a function when PyTorch's caching allocator has no memory, before the program gets the exception."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from cudatool.after_import import AfterImport

__all__ = ["TorchFailures"]

_HISTORY = 100_000  # allocator events that PyTorch keeps where it did not keep any


class TorchFailures:
    """Watches PyTorch's allocator, from its import or from now if it is imported already, until :meth:`stop`.

    The observer is the one of PyTorch's own examples: it runs on the thread of the request, with the allocator's lock
    released, and cannot be detached; after :meth:`stop` it does nothing.

    Parameters
    ----------
    failed
        Called with device, bytes requested, bytes allowed, bytes free.
    with_history
        Let PyTorch keep the history of its allocator until :meth:`stop`, unless it does already: for snapshots.
    """

    def __init__(self, failed: Callable[[int, int, int, int], None], *, with_history: bool = False) -> None:
        self._failed: Callable[[int, int, int, int], None] | None = failed
        self._with_history = with_history
        self._torch: Any = None
        self._began_history = False
        self._finder = AfterImport({"torch": self._watch})

    def start(self) -> None:
        """Begin to watch."""
        self._finder.start()

    def stop(self) -> None:
        """Call the function no longer. Stopping again changes nothing."""
        self._finder.stop()
        self._failed = None
        if self._began_history:
            self._began_history = False
            self._torch.cuda.memory._record_memory_history(enabled=None)

    @property
    def is_watching(self) -> bool:
        """Whether PyTorch's CUDA is in use and watched."""
        return self._torch is not None and self._failed is not None

    def dump(self, path: str) -> None:
        """Write PyTorch's snapshot of its allocator to a file."""
        self._torch.cuda.memory._dump_snapshot(path)

    def _watch(self, torch: ModuleType) -> None:
        if torch.version.cuda:
            torch.cuda._lazy_call(lambda: self._attach(torch))  # once its CUDA is initialized, or now if it is

    def _attach(self, torch: Any) -> None:
        if self._failed is None:
            return
        if self._with_history and not torch._C._cuda_isHistoryEnabled():
            # Stacks of frees, which PyTorch would take as well, say nothing of who holds what, and cost as much again.
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python", context="alloc")
            self._began_history = True
        torch._C._cuda_attach_out_of_memory_observer(self._observe)
        self._torch = torch

    def _observe(self, device: int, requested: int, allowed: int, free: int) -> None:
        if self._failed is not None:
            self._failed(device, requested, allowed, free)
