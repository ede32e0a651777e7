"""Accesses that need no check for races in one launch: no two of its threads can race there.

Most kernels compute their addresses from the indices of the thread and the block, from numbers and from arguments. For
such accesses the launch's arguments decide before it runs where each thread's lies (:mod:`cudatool.ptx.affine`):

- an access to device memory is independent if no other thread of the launch can meet it, unless both read. That needs
  the addresses of all accesses that it could race with. Barriers do not matter, and neither does what a thread really
  does: a branch leaves accesses out, it adds none;
- but a read through the read-only cache is not, of what its own thread may write, either: no order helps it;
- an access to shared memory is independent if no other thread of its block can meet it between the same two barriers,
  unless both read: in a stretch without writes, all reads are independent, wherever they are. It must be certain that
  all threads are in one stretch at a time: barriers are of the whole block (``Order.plain``), and one at most follows
  each (threads that end do nothing more). Else the whole kernel is one stretch.

Accesses that are independent have no instrumentation; the engine sees all others. Whatever is not followed counts as
meeting everything. A launch of which no access needs a check runs the code that launches without checks have.

In every kernel it helps to know where all its writes are: code looks at the others' addresses and leaves out reads of
memory that no thread of the launch writes. And where all of the memory that an access may touch can be used, or has
values, the other checks leave it out, too (:func:`needless`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from cudatool.ptx import Flow, Function, Symbol
from cudatool.ptx.affine import AffineAddresses, MemoryInstruction
from cudatool.ptx.forms import THREAD_INDICES, Form, may_meet
from cudatool.ptx.isa import Mode
from cudatool.ptx.operands import GENERIC, space_of
from cudatool.sim.jit.collective import Kind, suspension_of
from cudatool.sim.jit.instrument import Instrument, Needless

if TYPE_CHECKING:
    from cudatool.sim.jit.shadow import Shadow

__all__ = ["Independent", "LaunchFacts", "Reach", "needless"]

_OF_ACCESSES = Instrument.MEMCHECK | Instrument.INITCHECK | Instrument.RACECHECK  # what alone they look at
_KEPT = 64  # launches that are remembered
_PAIRS = 1 << 14  # of accesses that are compared; in kernels with more, all are looked at


class Reach(NamedTuple):
    """Between which addresses all accesses lie that one instruction makes in a launch."""

    line: int
    space: str
    """``"global"``, or ``"shared"``, whose addresses begin at 0 in each block."""
    first: int
    stop: int
    writes: bool
    aligned: bool
    """Each address is a multiple of the access' size."""


class LaunchFacts(NamedTuple):
    """What is known of a launch before it runs."""

    lines: frozenset[int]
    """Of PTX, all accesses of which are independent."""
    written: range | None
    """The addresses of device memory outside of which nothing is written; None if that is not known."""
    reaches: tuple[Reach, ...]
    """Of those accesses for which they are known."""
    followed: frozenset[int]
    """The lines of which the reaches of all accesses are known."""


class Independent:
    """The accesses of a kernel.

    Parameters
    ----------
    function
        Its calls inlined.
    parameters
        Where its parameters lie in the packed arguments.
    plain
        Whether nothing but barriers of the whole block orders its threads.
    """

    def __init__(self, function: Function, parameters: dict[str, int], *, plain: bool) -> None:
        self._addresses = AffineAddresses(function, parameters)
        self._sites = self._addresses.sites or ()
        self._uses_local = any(space_of(i) == "local" or i.opcode == "alloca" for i in function.instructions)
        self._stretches = self._find_stretches(function) if plain else [list(range(len(self._sites)))]
        self._known: dict[tuple[object, ...], LaunchFacts] = {}

    def _find_stretches(self, function: Function) -> list[list[int]]:
        """Return the sites that can execute between two barriers, for each first one; all sites if threads may part."""
        code = function.instructions
        barriers = {
            index
            for index, i in enumerate(code)
            if (row := suspension_of(i)) is not None and row.kind in (Kind.BARRIER, Kind.BARRIER_REDUCE)
        }
        flow = Flow(function, frozenset(barriers) | frozenset(index + 1 for index in barriers))
        stretches = []
        for start in (0, *(flow.at[index + 1] for index in sorted(barriers))):
            pending, blocks = [start], set[int]()
            while pending:
                number = pending.pop()
                if number not in blocks:
                    blocks.add(number)
                    block = flow.blocks[number]
                    ends = block.start < block.stop and block.stop - 1 in barriers
                    if not ends or code[block.stop - 1].guard is not None:
                        pending += block.successors
            inside = {
                index for number in blocks for index in range(flow.blocks[number].start, flow.blocks[number].stop)
            }
            if len(inside & barriers) > 1:
                return [list(range(len(self._sites)))]
            stretches.append([number for number, site in enumerate(self._sites) if site.index in inside])
        return stretches

    def of_launch(
        self,
        arguments: bytes,
        grid: Sequence[int],
        block: Sequence[int],
        device: range,
        address_of: Callable[[Symbol], int | None],
    ) -> LaunchFacts:
        """Return what is known of a launch.

        Parameters
        ----------
        device
            The addresses of device memory.
        address_of
            Given a variable: its address, or where it lies in shared memory.
        """
        if self._addresses.sites is None:
            return LaunchFacts(frozenset(), None, (), frozenset())
        key = arguments, tuple(grid), tuple(block), device
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = self._find(arguments, grid, block, device, address_of)
        return self._known[key]

    def may_write(self, apart: Set[int]) -> bool:
        """Whether the kernel may write to device memory at other lines of PTX than those `apart`."""
        return self._addresses.sites is None or any(
            site.mode is not Mode.READ and site.space != "shared" and site.line not in apart for site in self._sites
        )

    def leaves_nothing(self, kinds: Instrument, left_out: Needless) -> bool:
        """Whether a launch without the checks `left_out` has none of `kinds`: it may run as if it were not checked."""
        if self._addresses.sites is None or kinds & ~_OF_ACCESSES or (kinds & Instrument.MEMCHECK and self._uses_local):
            return False
        return all((kind, site.line) in left_out for kind in _OF_ACCESSES & kinds for site in self._sites)

    def _find(
        self,
        arguments: bytes,
        grid: Sequence[int],
        block: Sequence[int],
        device: range,
        address_of: Callable[[Symbol], int | None],
    ) -> LaunchFacts:
        places = []
        forms, extents = self._addresses.forms(arguments, grid, block, address_of)
        for site, form in zip(self._sites, forms, strict=True):
            if site.space == GENERIC:
                if form is not None and form.low >= device.start and form.high + site.width <= device.stop:
                    site = replace(site, space="global")
                else:
                    form = None
            places.append((site, form))
        writers = [(site, form) for site, form in places if site.mode is not Mode.READ and site.space != "shared"]
        written: range | None = range(device.stop, device.stop)
        if any(form is None for _, form in writers):
            written = None
        elif writers:
            written = range(
                min(form.low for _, form in writers if form),
                max(form.high + site.width for site, form in writers if form),
            )
        reaches = tuple(_reach(site, form, extents) for site, form in places if form is not None)
        unknown = {site.line for site, form in places if form is None}
        followed = frozenset(reach.line for reach in reaches) - unknown
        return LaunchFacts(self._lines(places, extents), written, reaches, followed)

    def _lines(self, places: list[tuple[MemoryInstruction, Form | None]], extents: tuple[int, ...]) -> frozenset[int]:
        bad = {site.line for site, _ in places if not site.weak}
        groups = [([*range(len(places))], "global", extents)]
        groups += [
            (stretch, "shared", (*extents[:3], 1, 1, 1, *extents[THREAD_INDICES:])) for stretch in self._stretches
        ]
        compared = 0
        for group, space, within in groups:
            here = [places[number] for number in group if places[number][0].space in (space, GENERIC)]
            for writer in (place for place in here if place[0].mode is not Mode.READ):
                compared += len(here)
                if compared > _PAIRS:
                    return frozenset()
                for other in here:
                    lines = {writer[0].line, other[0].line}
                    if not lines <= bad and (_meet(writer, other, within) or _is_stale(writer, other)):
                        bad |= lines
        return frozenset(site.line for site, _ in places) - bad


def _reach(site: MemoryInstruction, form: Form, extents: tuple[int, ...]) -> Reach:
    steps = [coefficient for coefficient, extent in zip(form.coefficients, extents, strict=True) if extent > 1]
    aligned = not any(one % site.width for one in (form.constant, *steps))
    first, stop = form.low, form.high + site.width
    return Reach(site.line, site.space, first, stop, site.mode is not Mode.READ, aligned)


def needless(known: LaunchFacts, kinds: Instrument, shadow: Shadow, shared_bytes: int) -> Needless:
    """Return which checks of which lines would find nothing in a launch."""
    found: set[tuple[Instrument, int]] = set()
    if kinds & Instrument.RACECHECK:
        found |= {(Instrument.RACECHECK, line) for line in known.lines}
    usable, filled = set(known.followed), set(known.followed)
    for one in known.reaches if kinds & (Instrument.MEMCHECK | Instrument.INITCHECK) else ():
        if one.space == "shared":
            if not (one.aligned and one.first >= 0 and one.stop <= shared_bytes):
                usable.discard(one.line)
            continue
        if one.line in usable and not (one.aligned and shadow.is_usable(one.first, one.stop, to_write=one.writes)):
            usable.discard(one.line)
        if kinds & Instrument.INITCHECK and one.line in filled and not shadow.has_values(one.first, one.stop):
            filled.discard(one.line)
    if kinds & Instrument.MEMCHECK:
        found |= {(Instrument.MEMCHECK, line) for line in usable}
    if kinds & Instrument.INITCHECK:
        found |= {(Instrument.INITCHECK, line) for line in filled}
    return frozenset(found)


def _is_stale(writer: tuple[MemoryInstruction, Form | None], other: tuple[MemoryInstruction, Form | None]) -> bool:
    """Whether a read through the read-only cache may find what any thread writes; forms of both are known."""
    a, b = writer[1], other[1]
    if not other[0].read_only or a is None or b is None:
        return False
    return a.low < b.high + other[0].width and b.low < a.high + writer[0].width


def _meet(
    a: tuple[MemoryInstruction, Form | None], b: tuple[MemoryInstruction, Form | None], extents: tuple[int, ...]
) -> bool:
    return a[1] is None or b[1] is None or may_meet(a[1], a[0].width, b[1], b[0].width, extents)
