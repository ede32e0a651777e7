"""Regions whose threads are asked first whether they have anything to do, 64 at once.

``if (key[node * 256 + threadIdx.x] == wanted[blockIdx.x]) found[blockIdx.x] = ...`` reads for each thread and writes
for one. All that such a region does, its *effects*, lies beyond a branch on what was loaded. Code up to there only
reads, so it can be run for 64 threads and thrown away::

    for each 64 threads of a row:
        ask all of them
        run the region for each that comes to an effect

Threads that come to none are through with the region: they have read what they read, in their order, before the others
go on, and PTX lets threads take turns as they like until they synchronize. One that comes to an effect begins again,
and what it has read before counts for nothing. The loop that asks stores nothing. So LLVM reads once what all threads
read at one address, and makes vectors of the others' loads, from both of which a store may keep it.

It pays where LLVM makes no vectors of the region, or had better not:

- there is a loop beyond the question, as in Rodinia's bfs: most nodes are not in the front. Where half of them are, the
  host need not guess of each whether it is;
- it is a *search*: all threads store at one address, but not the same. They would race, so in a program without races
  one thread of the block stores at most, and vectors would do for all threads what one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from cudatool.ptx import Address, Flow, Instruction, Register, elements, opcode_of
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import Control
from cudatool.sim.jit.even import ORDERED, PURE, Region, find_distances

__all__ = ["Question", "find_question"]

_LONG = 64  # instructions, beside those that all threads do alike, that are too many to be run for nothing
_OWN = ("%tid.x", "%tid.y", "%tid.z")


@dataclass(frozen=True, slots=True)
class Question:
    """The code that tells whether a thread comes to an effect.

    Attributes
    ----------
    blocks
        That code. It leads to effects, or to where there are none.
    effects
        The blocks that have effects, or before which threads stop asking.
    """

    blocks: tuple[int, ...]
    effects: frozenset[int]


def find_question(flow: Flow, first: int, ends: frozenset[int], alike: Set[str] | None) -> Question | None:
    """Return what threads ask in the region from block `first` to those that end it, None if it does not pay.

    At its `ends` the region leaves nothing. `alike` are the registers that all threads of a block have alike; None
    where the region is the whole kernel, which tells.
    """
    region = Region(flow, first, ends, lambda one, by: None)
    acting = {number for number in region.blocks if not _only_reads(region, number)}
    busy = {number for number in region.blocks if not acting.isdisjoint(region.reached([number]))}
    if first not in busy - acting:
        return None
    if alike is None:
        distances, _ = find_distances(region, (), dict.fromkeys(_OWN))
        alike = {name for name, distance in distances.items() if distance == 0}
    effects = acting | _far_reading(region, busy - acting, alike)
    blocks = None if first in effects else _asking(region, busy - effects)
    if blocks is None or not _asks_memory(region, blocks, busy):
        return None
    own = [one for number in blocks for one in region.instructions(number) if not alike >= set(writes(one))]
    if len(own) > _LONG or not (_has_loop(region, acting) or _is_search(region, busy - set(blocks), alike)):
        return None
    return Question(blocks, frozenset(effects))


def _is_reading(one: Instruction) -> bool:
    return (one.opcode in PURE or one.opcode == "ld") and ORDERED.isdisjoint(one.modifiers)


def _code(region: Region, number: int) -> list[Instruction]:
    """Return a block's instructions without what leads on from it, or ends the region."""
    code = region.instructions(number)
    is_last = number in region.ends or (code and opcode_of(code[-1].opcode).control is not Control.NEXT)
    return code[:-1] if is_last else code


def _only_reads(region: Region, number: int) -> bool:
    """Whether a block has no effect, and what leads on from it can be part of a question."""
    last = region.last(number)
    if last is not None and number not in region.ends:
        control = opcode_of(last.opcode).control
        if control not in (Control.NEXT, Control.BRANCH) and (control is not Control.END or last.guard is not None):
            return False
    return all(map(_is_reading, _code(region, number)))


def _far_reading(region: Region, blocks: Set[int], alike: Set[str]) -> set[int]:
    """Return those of `blocks` in which threads load from where they have only just found out.

    Vectors would gather that, beyond a branch for few of their threads. So to come there counts as an effect. What all
    threads load first, at one address, is alike for all.
    """
    found: set[int] = set()
    same, differs = set(alike), set[str]()  # what is loaded or computed of that
    for number in (number for number in region.order if number in blocks):
        for one in _code(region, number):
            depends = not differs.isdisjoint(reads(one))
            is_load = one.opcode == "ld" and {"param", "const"}.isdisjoint(one.modifiers)
            if is_load and depends:
                found.add(number)
            if number == region.first and one.guard is None and not depends and same.issuperset(reads(one)):
                same |= set(writes(one))
            elif is_load or depends:
                differs |= set(writes(one))
    return found


def _asking(region: Region, blocks: Set[int]) -> tuple[int, ...] | None:
    """Return those of `blocks` through which threads may come before any effect, each before those that it leads to.

    None if they may go around a loop.
    """
    inside = {region.first} | _reached(region, region.first, blocks)
    if any(number in _reached(region, number, inside) for number in inside):
        return None
    return tuple(number for number in region.order if number in inside)


def _reached(region: Region, start: int, inside: Set[int]) -> set[int]:
    """Return the blocks to which one leads without leaving those `inside`."""
    found: set[int] = set()
    pending = [start]
    while pending:
        more = [after for after in region.after(pending.pop()) if after in inside and after not in found]
        found.update(more)
        pending += more
    return found


def _asks_memory(region: Region, blocks: Iterable[int], busy: Set[int]) -> bool:
    """Whether what threads load tells some of them that they have nothing to do; `blocks` come one after the other."""
    loaded: set[str] = set()  # or computed of that
    for number in blocks:
        for one in region.instructions(number):
            is_load = one.opcode == "ld" and {"param", "const"}.isdisjoint(one.modifiers)
            if is_load or not loaded.isdisjoint(reads(one)):
                loaded |= set(writes(one))
        last = region.last(number)
        guard = last.guard if last is not None else None
        if guard is not None and guard.name in loaded and not busy >= set(region.after(number)):
            return True
    return False


def _has_loop(region: Region, effects: Iterable[int]) -> bool:
    """Whether threads may go around a loop once they come to an effect."""
    return any(number in region.reached(region.after(number)) for number in region.reached(effects))


def _is_search(region: Region, effects: Iterable[int], alike: Set[str]) -> bool:
    """Whether all `effects` are stores at addresses that are alike for all threads, of what is not."""
    for number in effects:
        same = set(alike)
        for one in _code(region, number):
            if not _is_reading(one) and not _stores_at_one_address(one, same):
                return False
            # What is computed here alone is alike for all threads that come here.
            is_same = (one.opcode in PURE or "param" in one.modifiers) and same.issuperset(reads(one))
            same = same | set(writes(one)) if is_same and one.guard is None else same - set(writes(one))
    return True


def _stores_at_one_address(one: Instruction, alike: Set[str]) -> bool:
    if one.opcode != "st" or not ORDERED.isdisjoint(one.modifiers):
        return False
    address, value = one.operands
    if not isinstance(address, Address) or (isinstance(address.base, Register) and address.base.name not in alike):
        return False
    return any(isinstance(part, Register) and part.name not in alike for part in elements(value))
