"""The parts of recording that only the software device needs; imported only for that device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from cudatool import _driver, sim
from cudatool.collect import sim_living
from cudatool.collect.nvtx_ranges import RangeLog
from cudatool.collect.sim_driver import SimDriverCollector
from cudatool.collect.sim_host import watched_host_memory
from cudatool.collect.sim_living import in_flight
from cudatool.memory.allocator import CachingAllocator, in_operation
from cudatool.memory.pluggable import UncachedAllocator
from cudatool.recording.before import Before
from cudatool.sim import abi, drain, signals
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind

if TYPE_CHECKING:
    from cudatool.sim import Machine
    from cudatool.sim.observe.tape import Tape
    from cudatool.trace.events import Event

__all__ = ["drain", "driver", "facts_at_the_end", "flush", "in_flight", "living", "paused", "range_log"]


def paused() -> AbstractContextManager[bool]:
    """Return a context in which no other thread calls the driver: they wait."""
    return abi.lock


@contextmanager
def driver(
    machine: Machine, measure_accesses: bool, checks: Sequence[str], tape: Tape | None, held: Callable[[], list[Event]]
) -> Iterator[None]:
    """Pass the software driver's calls, and what its kernels do, to the subscribers of the hooks.

    `held` returns what the caching allocator already holds.
    """
    exact_write = AccessFlag.WRITE | AccessFlag.INEXACT

    def record_host_write(event: Event) -> None:
        """Turn the host writes that a program declares into operations that a replay can move."""
        if tape is not None and event.kind == Kind.HOST_ACCESS and event.flags & exact_write == AccessFlag.WRITE:
            is_done = bool(event.flags & AccessFlag.NOTICED)
            tape.host_writes(event.address, event.size, event.aux0, max(event.aux1, 1), is_done=is_done)

    # An allocator must not be called from within its own operations; finalizers free, and their exceptions are ignored.
    signals.keep_out_of(*vars(CachingAllocator).values(), *vars(UncachedAllocator).values())
    signals.keep_out_while(in_operation)
    hooks.measures_accesses = machine.measure_accesses = measure_accesses
    with _driver.refused_address_space():
        machine.check(checks)
    hooks.forget_destroyed(machine.objects.__contains__)  # what was destroyed while nothing recorded
    collector = SimDriverCollector(machine)
    sim.subscribe(collector)
    hooks.reports_graphs = True
    if tape is not None:
        tape.start(machine)
        hooks.subscribe(record_host_write)
    if collector.blocks is not None:
        hooks.subscribe(collector.blocks)
        drain()  # what is pending may use blocks that were given back
        collector.blocks.begin(held())
    try:
        with watched_host_memory(machine) if measure_accesses else nullcontext():
            yield
    finally:
        if tape is not None:
            hooks.unsubscribe(record_host_write)
            tape.stop()
        if collector.blocks is not None:
            hooks.unsubscribe(collector.blocks)
        machine.measure_accesses = False
        machine.check(())
        sim.unsubscribe(collector)


def range_log() -> RangeLog:
    """Return what reads the ranges of NVTX."""
    return RangeLog()


def flush() -> None:
    """Do nothing: what the driver does is reported when it happens."""


def facts_at_the_end() -> dict[str, Any]:
    """Return what a trace's header says that only the end of a recording shows: what kernels left in their heap."""
    machine = _driver.initialize().machine
    assert machine is not None
    left: Counter[str] = Counter()
    for context, heap in machine.heaps:
        if heap.taken() > 0 and context.error is None:  # what would have freed them may not have run
            left[", ".join(sorted(heap.kernels))] += heap.taken()
    return {"heap_blocks_left": left} if left else {}


def living(held: Iterable[Event]) -> Before:
    """Return the driver's live memory, and which of it other processes can use.

    Parameters
    ----------
    held
        Of our allocator: its segments are left out of the memory.
    """
    machine = _driver.initialize().machine
    assert machine is not None
    known = {event.address for event in held}
    return Before(allocations=sim_living.living(machine, known), notes=sim_living.shared(machine))
