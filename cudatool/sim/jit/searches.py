"""Loops that threads leave one by one, but in which what they load is alike: each searches a table for its own number.

Threads that go around such a loop together (:class:`.even.Part`) have all done equally many rounds. So what a round
makes of constants, and of what is alike when it begins, is alike for all that are still in the loop, also if it is not
for those that have left it: the counter, and what is loaded where it points at. It is computed once a round.

    for (x = 0; x < n; x++)
        if (table[x] >= own) break;     // x and table[x] are alike, own is not

While all threads are in such a loop, a round of a search is no more than to ask whether all of them stay.

A load is done before it is known which threads leave in this round, and only while some thread is in the loop. So it
must come before any of them can leave: in the block at which the loop begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudatool.ptx import Instruction
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import STRONG
from cudatool.sim.jit.special_registers import SAME_IN_ROW
from cudatool.sim.jit.table import loads_parameter

if TYPE_CHECKING:
    from cudatool.sim.jit.even import Region

__all__ = ["Alike", "find_alike", "find_constants"]

_SPACES = frozenset({"global", "shared", "const"})  # in which all threads have the same at one address


@dataclass(frozen=True, slots=True)
class Alike:
    """What the threads in a loop compute alike, round by round.

    Attributes
    ----------
    registers
        Those that are alike for all threads in the loop.
    before
        The places of the instructions that compute what they are when the loop begins, in order.
    code
        The places of the instructions that set them in each round, in order.
    is_search
        Whether a thread keeps nothing else from one round to the next.
    """

    registers: frozenset[str]
    before: tuple[int, ...]
    code: tuple[int, ...]
    is_search: bool


def find_constants(code: list[Instruction], is_pure: Callable[[Instruction], bool]) -> dict[str, int]:
    """Return the registers that depend on the block, parameters and constants alone, and where each is set."""
    counts: dict[str, int] = {}
    for one in code:
        for name in writes(one):
            counts[name] = counts.get(name, 0) + 1
    found: dict[str, int] = {}
    for index, one in enumerate(code):  # text order: a definition stands before its uses
        names = writes(one)
        if len(names) != 1 or counts[names[0]] != 1 or one.guard is not None:
            continue
        if (loads_parameter(one) or is_pure(one)) and _are_constant(one, found):
            found[names[0]] = index
    return found


def _are_constant(one: Instruction, constants: Mapping[str, int]) -> bool:
    return all(name in constants or name.startswith(SAME_IN_ROW) for name in reads(one))


def find_alike(
    region: Region,
    head: int,
    blocks: Set[int],
    distances: Mapping[str, int | None],
    is_pure: Callable[[Instruction], bool],
) -> Alike | None:
    """Return what threads compute alike in the loop of `blocks` that begins at `head`; None if they load nothing alike.

    Parameters
    ----------
    distances
        Of registers: 0 for those that are alike for all threads whenever they come to the loop.
    is_pure
        Whether an instruction can be done once for all threads, also if none of them comes to it.
    """
    constants = region.constants
    loop = _Loop(region, head, blocks, is_pure)
    found, entering = loop.alike(distances, constants)
    once = {index for name in found for index in loop.writers[name]}
    code = tuple(index for index in loop.spine if index in once)
    if not any(region.code[index].opcode == "ld" for index in code):
        return None
    needed = {source for index in code for source in reads(region.code[index]) if source not in loop.writers}
    entries = sorted(set(entering.values()))
    needed |= {source for index in entries for source in reads(region.code[index])}
    first = _definitions(region.code, (name for name in needed if distances.get(name) != 0), constants)
    is_search = region.flow.blocks[head].live_in & loop.writers.keys() <= found
    return Alike(frozenset(found), (*sorted(first), *entries), code, is_search)


def _definitions(code: list[Instruction], names: Iterable[str], constants: Mapping[str, int]) -> set[int]:
    """Return the places of the instructions that compute constants."""
    found: set[int] = set()
    pending = list(names)
    while pending:
        index = constants.get(pending.pop(), -1)
        if index >= 0 and index not in found:
            found.add(index)
            pending += reads(code[index])
    return found


class _Loop:
    """The blocks of a loop, and where they set registers."""

    def __init__(self, region: Region, head: int, blocks: Set[int], is_pure: Callable[[Instruction], bool]) -> None:
        self.region, self.head, self.blocks, self.is_pure = region, head, blocks, is_pure
        self.writers: dict[str, list[int]] = {}
        for number in blocks:
            for index in self.region.places(number):
                for name in writes(region.code[index]):
                    self.writers.setdefault(name, []).append(index)
        # What all threads come through that go around, in order.
        spine = (number for number in region.order if number in blocks and not self._goes_around(number))
        self.spine = [index for number in spine for index in region.places(number)]

    def alike(
        self, distances: Mapping[str, int | None], constants: Mapping[str, int]
    ) -> tuple[set[str], dict[str, int]]:
        """Return the registers that are alike for all threads in the loop, and where they are set before it."""
        live = self.region.flow.blocks[self.head].live_in & self.writers.keys()
        entries = {name: self._entry(name, constants) for name in live}
        entering = {name: index for name, index in entries.items() if index is not None}
        found = self.writers.keys() - (live - entering.keys())

        def is_alike(name: str) -> bool:
            if name in self.writers:
                return name in found
            return distances.get(name) == 0 or name in constants or name.startswith(SAME_IN_ROW)

        def is_set_alike(index: int) -> bool:
            return self._may_be_shared(index) and all(map(is_alike, reads(self.region.code[index])))

        while gone := {name for name in found if not all(map(is_set_alike, self.writers[name]))}:
            found -= gone
        return found, {name: index for name, index in entering.items() if name in found}

    def _goes_around(self, without: int) -> bool:
        """Whether a thread can go around the loop without coming through a block."""
        if without == self.head:
            return False
        pending, seen = [self.head], {self.head}
        while pending:
            for one in self.region.after(pending.pop()):
                if one == self.head:
                    return True
                if one in self.blocks and one != without and one not in seen:
                    seen.add(one)
                    pending.append(one)
        return False

    def _may_be_shared(self, index: int) -> bool:
        """Whether an instruction can be done once for all threads that go around the loop."""
        one = self.region.code[index]
        if index not in self.spine or one.guard is not None or len(writes(one)) != 1:
            return False
        if one.opcode == "ld":
            is_plain = STRONG.isdisjoint(one.modifiers) and not _SPACES.isdisjoint(one.modifiers)
            return is_plain and index in self.region.places(self.head)
        return self.is_pure(one)

    def _entry(self, name: str, constants: Mapping[str, int]) -> int | None:
        """Return where a register is set before the loop, None if it may differ between threads that come there."""
        region = self.region
        places = {
            number: index
            for number in region.blocks
            if number not in self.blocks
            for index in region.places(number)
            if name in writes(region.code[index])
        }
        exits = {after for block in self.blocks for after in region.after(block)} - self.blocks
        for number, index in places.items():
            # Each way to the loop comes through this place, and through no other one from there on.
            others = {after for block in places.keys() - {number} for after in region.after(block)}
            if self.head not in region.reached([region.first, *exits, *others], without=number):
                one = region.code[index]
                is_alone = one.guard is None and len(writes(one)) == 1
                return index if is_alone and self.is_pure(one) and _are_constant(one, constants) else None
        return None
