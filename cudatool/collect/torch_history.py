"""PyTorch's history of its allocator, with the stack of each allocation, for as much of the time as it may cost.

PyTorch takes a stack for each allocation while the history is on, which programs of small kernels notice. So it has an
account, of the program's time::

    may have cost  =  0.2 s  +  share * time since the beginning
    has cost       =  5 us   *  allocations while it was on

It is on until it has cost what it may, and again once it may cost what a second of it does at the program's present
rate. A program that allocates seldom has it all the time; one that allocates 30,000 times a second for one second in
fifteen. When PyTorch takes more memory from the driver than ever before, something new has begun: then it comes on at
once, for up to 0.2 s more than it may, which later seconds pay back.
"""

from __future__ import annotations

import threading
from inspect import signature
from time import monotonic_ns
from typing import Any, Final

from cudatool.collect.replaced import Replaced

__all__ = ["TorchHistory"]

_EVENTS: Final = 100_000  # that PyTorch keeps
_COST_NS: Final = 5_000  # of one allocation: 3.1 to 3.9 us in the loop of a small encoder (H200, PyTorch 2.11)
_AT_FIRST_NS: Final = 200_000_000
_LEAST_NS: Final = 1_000_000_000  # to be on at once
_PERIOD_S: Final = 0.2  # a look takes 10 us for each device


class TorchHistory:
    """Turns PyTorch's history on and off until :meth:`stop`, or until the program does that itself.

    Parameters
    ----------
    torch
        The module; its CUDA is initialized.
    share
        Of the program's time, above 0; 1 keeps the history on.

    Raises
    ------
    RuntimeError
        PyTorch's allocator keeps no history.
    """

    def __init__(self, torch: Any, share: float) -> None:
        self._torch, self._share = torch, share
        self._set = torch.cuda.memory._record_memory_history
        # Ranges are noted by an observer that, of one thread, another could not take away again.
        known = signature(getattr(torch.cuda.memory, "_record_memory_history_impl", self._set)).parameters
        any_thread = "global_record_annotations"
        self._any_thread = {any_thread: True} if any_thread in known else {}
        self._lock = threading.Lock()  # of what follows
        self._is_ours = self._is_on = True
        self._began = self._looked = monotonic_ns()
        self._cost = self._on_ns = 0
        self._allocations, self._most_reserved = self._figures()
        self._turn(on=True)
        self._replaced = Replaced()
        self._replaced.replace(torch.cuda.memory, "_record_memory_history", self._set_by_program)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if share < 1:
            self._thread = threading.Thread(target=self._run, name="cudatool PyTorch history", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Turn the history off, if it is not the program's by now. Stopping again changes nothing."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._replaced.put_back()
        with self._lock:
            if self._is_ours and self._is_on:
                self._turn(on=False)
            self._is_ours = False

    @property
    def kept(self) -> float:
        """The part of the time so far in which the history was on; 1 if the program has turned it on or off."""
        with self._lock:
            if not self._is_ours:
                return 1.0
            now = monotonic_ns()
            on = self._on_ns + (now - self._looked if self._is_on else 0)
            return on / max(now - self._began, 1) if self._thread is not None else 1.0

    def look(self) -> None:
        """Turn the history on or off, by what it has cost so far."""
        with self._lock:
            if not self._is_ours:
                return
            if self._torch._C._cuda_isHistoryEnabled() != self._is_on:  # the program did it in a way that is not seen
                self._is_ours = False
                return
            now, (allocations, reserved) = monotonic_ns(), self._figures()
            passed = max(now - self._looked, 1)
            cost = max(allocations - self._allocations, 0) * _COST_NS  # the program may set the count to 0
            if self._is_on:
                self._cost += cost
                self._on_ns += passed
            grows = reserved > self._most_reserved
            self._looked, self._allocations = now, allocations
            self._most_reserved = max(self._most_reserved, reserved)
            left = _AT_FIRST_NS + int(self._share * (now - self._began)) - self._cost
            if grows:
                left += _AT_FIRST_NS
            if self._is_on and left < 0:
                self._turn(on=False)
            elif not self._is_on and left >= (1 if grows else cost * _LEAST_NS // passed):
                self._turn(on=True)

    def _run(self) -> None:
        while not self._over.wait(_PERIOD_S) and self._is_ours:
            self.look()

    def _turn(self, *, on: bool) -> None:
        self._is_on = on
        if on:
            # Stacks of frees, which PyTorch would take as well, say nothing of who holds what, and cost as much again.
            self._set(max_entries=_EVENTS, stacks="python", context="alloc", **self._any_thread)
        else:
            self._set(enabled=None)

    def _set_by_program(self, *args: Any, **given: Any) -> Any:
        with self._lock:
            self._is_ours = False
        return self._set(*args, **given)

    def _figures(self) -> tuple[int, int]:
        """Return how often PyTorch allocated so far, and the bytes that it has from the driver, of all devices."""
        # PyTorch's public function returns nothing while its CUDA is being initialized.
        stats_of = self._torch._C._cuda_memoryStats
        stats = [stats_of(device) for device in range(self._torch.cuda.device_count())]
        return (
            sum(one["allocation"]["all"]["allocated"] for one in stats),
            sum(one["reserved_bytes"]["all"]["current"] for one in stats),
        )
