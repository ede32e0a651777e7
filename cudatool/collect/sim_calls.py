"""The calls of the software driver that are in progress, and what reports of them ask of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudatool.collect.callers import calling_api
from cudatool.collect.sim_graphs import GraphWatcher
from cudatool.collect.sim_ids import context_number, id_of_stream
from cudatool.trace import hooks
from cudatool.trace.events import Kind, WarningCode, WarningFlag

if TYPE_CHECKING:
    from cudatool.sim import Machine
    from cudatool.sim.allocations import Allocation

__all__ = ["CallsInProgress", "DriverCall", "EmitCall", "not_recorded", "pointed"]


class DriverCall:
    """The driver call in progress on a thread."""

    __slots__ = (
        "began",
        "copies",
        "device",
        "is_open",
        "is_ours",
        "is_ready",
        "is_reported",
        "later",
        "memory",
        "operation",
        "outer",
        "owners",
        "shape",
        "values",
    )

    def __init__(self, outer: DriverCall | None = None) -> None:
        self.outer = outer  # that a finalizer made it inside of
        self.operation: Any = None  # the last operation that it enqueued
        self.shape: Any = None  # of that, if it is a launch: the kernel, the grid, the block
        self.copies: tuple[Any, ...] = ()  # those of them that copy or fill
        self.memory: tuple[Any, ...] = ()  # those of them that allocate or free
        self.values: tuple[Any, ...] = ()  # those of them that wait for a value in memory or write it
        self.is_ready = False  # whether what it asks for has completed
        self.later: list[Any] = []  # operations executed during the call, reported after the call itself
        self.is_open = False  # whether it has begun and not ended
        self.is_ours = False  # whether our runtime makes it, which reports it
        self.is_reported = False  # whether the call itself was, before its end
        self.began = 0  # when, of a call that synchronizes
        self.device = 0  # of the stream that it is about to destroy
        # Correlation and stream id of each operation that it enqueued; another thread may have run it since.
        self.owners: dict[int, tuple[int, int]] = {}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.call = DriverCall()


class CallsInProgress:
    """The calls in progress, one on each thread.

    Attributes
    ----------
    machine
        The software device.
    graphs
        Describes graphs that calls make or change.
    thread
        Its ``call`` is that of the calling thread.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.graphs = GraphWatcher(machine)
        self.thread = _Thread()

    @property
    def device(self) -> int:
        """The device of the thread's current context."""
        stack = self.machine.thread.contexts
        return stack[-1].device.ordinal if stack else 0

    @property
    def context(self) -> int:
        """The number of the thread's current context."""
        stack = self.machine.thread.contexts
        return context_number(stack[-1]) if stack else 0

    def allocation(self, address: int) -> Allocation | None:
        """Return the allocation that holds an address, while other threads may take and free memory."""
        allocations = self.machine.allocations
        return allocations.look_up(allocations.holding, address)

    def allocation_at(self, address: int) -> Allocation | None:
        """Return the allocation that begins at an address, likewise."""
        allocations = self.machine.allocations
        return allocations.look_up(allocations.at, address)

    def stream(self, handle: int) -> tuple[int, int]:
        """Return device and stream id for a handle that a program passed."""
        handle = handle or self.machine.null_stream
        found = self.machine.objects.get(handle)
        if found is not None:
            return found.context.device.ordinal, id_of_stream(found)
        return self.device, hooks.stream_id(self.device, handle, context=self.context, api=calling_api)

    def owner(self) -> tuple[int, int, int]:
        """Return correlation, device and stream id of what the call enqueued; zeros if it enqueued nothing."""
        operation = self.thread.call.operation
        if operation is None:
            return 0, self.device, 0
        correlation, stream = self.thread.call.owners[operation.sequence]
        return correlation, operation.stream.context.device.ordinal, stream


EmitCall = Callable[[CallsInProgress, dict[str, Any], str], None]
"""Emits the event that a call stands for; it gets the call's arguments by their names, and the call's own name."""


def not_recorded(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    """Report that the call enqueued accesses that no event describes."""
    text = f"{name}: what it enqueues is not recorded"
    hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.CALL_NOT_RECORDED)


def pointed(address: int) -> int:
    """Return the 64-bit word that a call stored through an output pointer."""
    return ctypes.c_uint64.from_address(address).value
