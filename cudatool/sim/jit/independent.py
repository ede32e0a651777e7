"""Accesses that need no check for races in one launch: no two of its threads can race there.

Most kernels compute their addresses from the indices of the thread and the block, from numbers and from arguments. For
such accesses the launch's arguments decide before it runs where each thread's lies (:mod:`cudatool.ptx.affine`):

- an access to device memory is independent if no other thread of the launch can meet it, unless both read. That needs
  the addresses of all accesses that it could race with. Barriers do not matter, and neither does what a thread really
  does: a branch leaves accesses out, it adds none;
- an access to shared memory is independent if no other thread of its block can meet it between the same two barriers,
  unless both read: in a stretch without writes, all reads are independent, wherever they are. It must be certain that
  all threads are in one stretch at a time: one barrier at most follows each (threads that end do nothing more).

Accesses that are independent have no instrumentation; the engine sees all others. This is for kernels that know
nothing but barriers of the whole block (``Order.plain``). Whatever is not followed counts as meeting everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudatool.ptx import Flow, Function, Symbol
from cudatool.ptx.affine import AffineAddresses, Form, Site, may_meet
from cudatool.ptx.isa import Mode
from cudatool.sim.jit.collective import Kind, suspension_of

__all__ = ["Independent"]

_KEPT = 64  # launches that are remembered


class Independent:
    """The accesses of a kernel that only barriers of the whole block order.

    Parameters
    ----------
    function
        Its calls inlined.
    parameters
        Where its parameters lie in the packed arguments.
    """

    def __init__(self, function: Function, parameters: dict[str, int]) -> None:
        self._addresses = AffineAddresses(function, parameters)
        self._sites = self._addresses.sites or ()
        self._stretches = self._find_stretches(function)
        self._known: dict[tuple[object, ...], frozenset[int]] = {}

    def _find_stretches(self, function: Function) -> list[list[int]] | None:
        """Return the sites that can execute between two barriers, for each first one; None if threads may part."""
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
                return None
            stretches.append([number for number, site in enumerate(self._sites) if site.index in inside])
        return stretches

    def lines(
        self,
        arguments: bytes,
        grid: Sequence[int],
        block: Sequence[int],
        address_of: Callable[[Symbol], int | None],
    ) -> frozenset[int]:
        """Return the lines of PTX all accesses of which are independent in a launch.

        Parameters
        ----------
        address_of
            Given a variable: its address, or where it lies in shared memory.
        """
        if not self._sites:
            return frozenset()
        key = arguments, tuple(grid), tuple(block)
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = self._find(arguments, grid, block, address_of)
        return self._known[key]

    def _find(
        self,
        arguments: bytes,
        grid: Sequence[int],
        block: Sequence[int],
        address_of: Callable[[Symbol], int | None],
    ) -> frozenset[int]:
        sites, forms = self._sites, self._addresses.forms(arguments, grid, block, address_of)
        bad = {site.line for site in sites if not site.weak}
        everywhere, own_block = (*block, *grid), (*block, 1, 1, 1)
        groups: list[tuple[list[int], str, tuple[int, ...]]] = [([*range(len(sites))], "global", everywhere)]
        if self._stretches is None:
            bad |= {site.line for site in sites if site.space != "global"}
        else:
            groups += [(stretch, "shared", own_block) for stretch in self._stretches]
        for group, space, extents in groups:
            here = [number for number in group if sites[number].space in (space, "generic")]
            writers = [number for number in here if sites[number].mode is not Mode.READ]
            for writer in writers:
                for number in here:
                    if not {sites[writer].line, sites[number].line} <= bad and _meet(
                        sites[writer], forms[writer], sites[number], forms[number], extents
                    ):
                        bad |= {sites[writer].line, sites[number].line}
        return frozenset(site.line for site in sites) - bad


def _meet(a: Site, a_form: Form | None, b: Site, b_form: Form | None, extents: tuple[int, ...]) -> bool:
    if a.mode is Mode.ATOMIC and b.mode is Mode.ATOMIC:
        return False  # both are looked at anyhow
    return a_form is None or b_form is None or may_meet(a_form, a.width, b_form, b.width, extents)
