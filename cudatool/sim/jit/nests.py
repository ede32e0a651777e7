"""Loops with loops inside that threads leave one by one, and that add up what they load: convolutions, say.

    for (ja = first(own); ja <= last(own); ja++)
        for (ia = ...; ia <= ...; ia++)
            sum += a[...] * b[...];

Each number of such a sum waits for the one before, and a thread is in it for so long that the host does not look far
enough ahead to begin with the next one. So threads go around it together (:class:`.even.Part`), also if none of its
loops ends alike for them, and though what they load lies in any order: sixteen sums are under way at once.

A round of the outer loop consists of *turns*: what comes before the loops inside, each of these, and what comes after
them. Threads that are not where a turn begins pass it by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from cudatool.ptx import Instruction
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import FLOATS, STRONG

if TYPE_CHECKING:
    from cudatool.sim.jit.even import Region

__all__ = ["Turn", "find_nest"]

_SUMS = frozenset({"add", "sub", "fma", "mad"})
_UNORDERED = STRONG | {"local"}


class Turn(NamedTuple):
    """A part of a round: the blocks that begin at `head`, which threads go around if it `is_loop`."""

    head: int
    blocks: frozenset[int]
    is_loop: bool


def find_nest(
    region: Region, heads: Sequence[int], end: int, is_computed: Callable[[Instruction], bool]
) -> Sequence[Turn]:
    """Return the turns of the loop that begins at the first of `heads` and has the others inside; none if it has not.

    All ways out of it lead to the block `end`. There are none either if it does anything but compute and load, or if
    none of the loops inside is a sum.
    """
    outer, *inner = heads
    blocks = region.loops[outer]
    if not inner or any(not region.loops[one] < blocks for one in inner):
        return ()
    if any(one in region.loops[other] for one in inner for other in inner if one != other):
        return ()
    last = region.meeting_point(inner[-1])
    if last is None or last not in blocks or last in heads:
        return ()
    starts = [*heads, last]
    turns = []
    for place, head in enumerate(starts):
        own = region.up_to(head, {*starts, end})
        later = {head, *starts[place + 1 :]} if head in inner else set(starts[place + 1 :])
        if region.goes_around(head, own) or not region.leads(head, own) <= {outer, end} | later:
            return ()
        turns.append(Turn(head, frozenset(own), head in inner))
    code = [one for turn in turns for number in turn.blocks for one in region.instructions(number)]
    if not all(is_computed(one) or _loads(one) for one in code):
        return ()
    kept = region.flow.blocks[outer].live_in
    return turns if any(turn.is_loop and _is_sum(region, turn, kept) for turn in turns) else ()


def _loads(one: Instruction) -> bool:
    return one.opcode == "ld" and _UNORDERED.isdisjoint(one.modifiers)


def _is_sum(region: Region, loop: Turn, kept: Set[str]) -> bool:
    """Whether each round of a loop adds what it has loaded to a number in floating point.

    It has that from the round before, and the first from the outer loop's, of those that are `kept` there.
    """
    code = [one for number in loop.blocks for one in region.instructions(number)]
    if not any(map(_loads, code)):
        return False
    carried = region.flow.blocks[loop.head].live_in & kept
    sums = [one for one in code if one.opcode in _SUMS and not FLOATS.isdisjoint(one.modifiers)]
    return any(name in carried for one in sums for name in writes(one))
