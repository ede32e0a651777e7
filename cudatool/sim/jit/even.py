"""Which parts of a region all threads of a row run alike, and what of it they compute alike.

A loop over threads that have a loop of their own inside is none that LLVM vectorizes: it would run each thread to its
end before the next begins. Where neighboring threads go around such a loop equally often, they can as well do each
round together. So the code of a region is divided into *parts*: between two parts all threads go the same way, and
inside of one they need not.

That is known from the registers. A register is *scalar* if all its values in the region are: of neighboring threads
each holds what the first one holds and a known multiple, its *distance*, of its place after that one. Distance 0 is a
value that all of them share, and a branch on it is *even*. Arithmetic of PTX wraps around, and so do multiples: sums
and products with constants keep a distance exactly. What compares, widens or divides such a number keeps it only if
the row does not wrap around or go past the end of a loop in between; those are *checked*, when the code runs.

Loops that end differently for each thread belong to the part before them. If they do nothing but compute, or load what
is alike for all threads in them (:mod:`.searches`), threads go around them together all the same, and those that are
through wait for the others. What comes after them, up to where all threads are together again, is a loop of one round.
So is a *detour*: long code that only computes, and that is skipped if no thread comes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from cudatool.ptx import Address, Flow, Immediate, Instruction, Operand, Register, Symbol, elements, type_bytes
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import STRONG, Control, opcode_of
from cudatool.sim.jit.nests import find_nest
from cudatool.sim.jit.searches import Alike, find_alike, find_constants
from cudatool.sim.jit.special_registers import SAME_IN_ROW, SPECIAL
from cudatool.sim.jit.table import loads_parameter, types_of

__all__ = [
    "MOST",
    "MOST_BLOCKS",
    "ORDERED",
    "PURE",
    "WIDTH",
    "DistanceCheck",
    "Even",
    "Part",
    "Region",
    "ToCheck",
    "check_of",
    "distance_in_line",
    "find_distances",
    "find_even",
    "find_parts",
    "place_in_line",
    "whole_check",
]

WIDTH = 16
"""How many threads do a round together: LLVM makes vectors of a loop with that many rounds, and no rest."""

MOST = 8192
"""Threads that a row has at most, of blocks beside each other."""

MOST_BLOCKS = 96
"""Blocks of code that a region has at most, for its threads to run it together."""
_DETOUR = 24  # instructions from which on to skip them pays
_MOST_WRITTEN = 800  # instructions of all parts
_MOST_KEPT = 40  # registers that differ between threads, from one part to the next
_MOST_KEPT_OF_ROWS = 12
_SLOW = frozenset({"div", "rem", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh"})
"""What takes longer than to wait for memory: rows of threads gain nothing by it, and take longer to compile."""

_INTEGERS = {f"{kind}{bits}" for kind in "usb" for bits in (32, 64)}
_COMPUTES = """add sub mul mad fma div rem abs neg min max and or xor not shl shr lop3 bfe bfi shf prmt popc clz brev
mov cvt cvta setp selp slct rcp sqrt rsqrt ex2 lg2 sin cos mul24 mad24 sad copysign testp"""
PURE = frozenset(_COMPUTES.split())  # the result depends on the operands alone
_READS = frozenset({"ld", "ldu", "tex", "tld4"})
_SIDE_BY_SIDE = PURE | {"ld", "st", "bra"}  # what LLVM can do for several threads at once
_COMPUTED = (PURE | {"bra"}) - {"div", "rem", "sin", "cos", "lg2", "tanh"}  # LLVM has vectors of instructions for it
ORDERED = STRONG | {"local", "cc"}
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"})


@dataclass(frozen=True, slots=True)
class DistanceCheck:
    """What must hold for the result of an instruction to have its distance.

    Attributes
    ----------
    register, distance
        The operand that the row must not wrap around in, read as a number of type `type_name`.
    type_name
        As PTX has it.
    same
        The results of the first and the last thread must be equal, too: then those between are.
    """

    register: str
    distance: int
    type_name: str
    same: bool


ToCheck = Callable[[Instruction, list[int]], DistanceCheck | None]
"""Says what must be checked for an instruction, as :func:`whole_check` does."""


@dataclass(frozen=True, slots=True)
class Part:
    """What threads do until they have to go the same way.

    Attributes
    ----------
    head
        The block at which it begins.
    chain
        The blocks that all threads come through, in order.
    blocks
        These and the ones that only some of them may come through.
    after
        Where it leads: no block if threads end or suspend there, one, or the two of its even branch: where that
        goes, and what follows otherwise.
    loops
        Loops that come in between, which each thread leaves when it is through, in an order in which none leads back
        to one before it: parts for a round of each. Of a loop that has others inside (:mod:`.nests`): what a round
        of it consists of, the last of which leads back to it.
    is_detour
        Of a loop: whether it has one round at most, which is skipped if no thread comes there.
    alike
        Of a loop: what those that are in it compute alike, if they load something alike.
    """

    head: int
    chain: tuple[int, ...]
    blocks: frozenset[int]
    after: tuple[int, ...]
    loops: tuple[Part, ...] = ()
    is_detour: bool = False
    alike: Alike | None = None


@dataclass(frozen=True, slots=True)
class Even:
    """A region that threads run together.

    Attributes
    ----------
    parts
        By the block at which each begins; the region begins with the first.
    distances
        Of the scalar registers.
    by_row
        Whether all threads of a row do a round together, rather than :data:`WIDTH` of them.
    """

    parts: Mapping[int, Part]
    distances: Mapping[str, int]
    by_row: bool = False

    @property
    def has_nests(self) -> bool:
        """Whether threads go together around loops with others inside that end differently for each (:mod:`.nests`)."""
        return any(loop.loops for part in self.parts.values() for loop in part.loops)


def find_even(
    flow: Flow,
    first: int,
    ends: frozenset[int],
    before: Sequence[Instruction],
    own: Mapping[str, int | None],
    strides: Iterable[int] = (),
    far: Iterable[int] = (),
    *,
    nests_alone: bool = False,
) -> Even | None:
    """Return how threads run a region together, None if that is no gain.

    Parameters
    ----------
    first
        The block at which the region begins; `ends` are those that suspend all threads.
    before
        What is computed once more when the region begins.
    own
        The registers that each thread has from what came before, and the distances that they seem to be at there, which
        is looked at when the code runs; None for none.
    strides, far
        Where loops begin whose rounds a row of threads does together: neighbors' accesses are apart from those of the
        next round (:mod:`.steps`); and those of which they are far, by the size of the grid.
    nests_alone
        Whether it is a gain for the sake of nested loops (:mod:`.nests`) alone.
    """
    if not nests_alone:
        found = _find_even(Region(flow, first, ends, whole_check), before, own, set(strides), set(far))
        if found is not None and not found.has_nests:
            return found
    # Where a check fails, threads go on one after the other to the end of the region, which takes long in such loops.
    # A quotient, say of a thread's number by the rows of a matrix, changes among sixteen threads in one round or other.
    region = Region(flow, first, ends, _no_quotients)
    loops = [region.loops[head] for head in region.loops.keys() & set(region.blocks)]
    if not any(inner < outer for outer in loops for inner in loops):
        return None
    found = _find_even(region, before, own, set(strides), set(far))
    return found if found is not None and found.has_nests else None


def _find_even(
    region: Region, before: Sequence[Instruction], own: Mapping[str, int | None], strides: set[int], far: set[int]
) -> Even | None:
    if len(region.blocks) > MOST_BLOCKS or not (region.has_loop or region.has_detour()):
        return None
    loops = region.loops.keys() & set(region.blocks)
    by_row = bool(loops) and loops <= strides and (loops <= far or not region.is_slow(loops))
    distances, uneven = find_distances(region, before, own)
    if region.first in uneven:
        return None
    parts = find_parts(region, uneven, distances, detours=not by_row)
    if parts is None or not _is_worth_it(region, parts, distances, by_row=by_row):
        return None
    return Even(parts, {name: d for name, d in distances.items() if d is not None}, by_row)


class Region:
    """The blocks from `first` to those that end it.

    `to_check` says what its scalar registers depend on. If neighbors `read_first`, loads before anything is written are
    done once for all threads that load from one address.
    """

    def __init__(
        self, flow: Flow, first: int, ends: frozenset[int], to_check: ToCheck, *, read_first: bool = False
    ) -> None:
        self.flow, self.first, self.ends, self.to_check = flow, first, ends, to_check
        self.code = flow.function.instructions
        self.blocks: list[int] = []
        pending = [first]
        while pending:
            number = pending.pop()
            if number not in self.blocks:
                self.blocks.append(number)
                pending += self.after(number)
        self.before: dict[int, set[int]] = {number: set() for number in self.blocks}
        for number in self.blocks:
            for after in self.after(number):
                self.before[after].add(number)
        self.has_loop = any(number in self.reached(self.after(number)) for number in self.blocks)
        self.loops = flow.natural_loops() if self.has_loop else {}
        self.order = self._order()
        self._ending = {number for number in self.blocks if self._can_end(number)}
        self._meeting: dict[int, int | None] = {}
        self.early = self._loads_before_writes() if read_first else frozenset[int]()

    def after(self, number: int) -> list[int]:
        return [] if number in self.ends else self.flow.blocks[number].successors

    def _order(self) -> list[int]:
        """Return the blocks, each before those that it leads to unless these lead back to it."""
        done: list[int] = []
        seen = {self.first}
        path = [(self.first, iter(self.after(self.first)))]
        while path:
            number, following = path[-1]
            one = next((one for one in following if one not in seen), None)
            if one is None:
                done.append(number)
                path.pop()
            else:
                seen.add(one)
                path.append((one, iter(self.after(one))))
        return done[::-1]

    def _loads_before_writes(self) -> frozenset[int]:
        """Return the ids of the loads that come before whatever writes or orders memory, on each way to them."""
        found: set[int] = set()
        written: dict[int, bool] = {}
        for number in self.order:
            # A loop leads back from a block that was not looked at.
            after = any(written.get(before, True) for before in self.before[number])
            for one in self.instructions(number):
                if one.opcode == "ld" and not after and ORDERED.isdisjoint(one.modifiers):
                    found.add(id(one))
                after = after or not (one.opcode in PURE | _READS or opcode_of(one.opcode).control is not Control.NEXT)
            written[number] = after
        return frozenset(found)

    def has_detour(self) -> bool:
        """Whether some branch may lead past code that is long."""
        for number in self.blocks:
            if self.branches(number) and (meeting := self.meeting_point(number)) in self.after(number):
                between = self.reached(self.after(number), without=meeting)
                if sum(len(self.instructions(one)) for one in between) >= _DETOUR:
                    return True
        return False

    def is_slow(self, loops: Iterable[int]) -> bool:
        """Whether one of the loops that begin at these blocks computes more than it waits for memory."""
        blocks = {number for head in loops for number in self.loops[head]}
        return any(one.opcode in _SLOW for number in blocks for one in self.instructions(number))

    @cached_property
    def constants(self) -> dict[str, int]:
        """The registers that depend on the block, parameters and constants alone, and where each is set."""
        return find_constants(self.code, _is_computed)

    def instructions(self, number: int) -> list[Instruction]:
        block = self.flow.blocks[number]
        return self.code[block.start : block.stop]

    def places(self, number: int) -> range:
        """Return the places of a block's instructions."""
        block = self.flow.blocks[number]
        return range(block.start, block.stop)

    def last(self, number: int) -> Instruction | None:
        block = self.flow.blocks[number]
        return self.code[block.stop - 1] if block.stop > block.start else None

    def branches(self, number: int) -> bool:
        """Whether more than one way leads on from a block: to others, or to the end of the thread."""
        last = self.last(number)
        if last is None or number in self.ends:
            return False
        control = opcode_of(last.opcode).control
        return control is Control.TABLE or (control in (Control.BRANCH, Control.END) and last.guard is not None)

    def reached(self, start: Iterable[int], without: int | None = None) -> set[int]:
        """Return the blocks of `start` and those that they lead to, not through the block `without`."""
        found: set[int] = set()
        pending = list(start)
        while pending:
            number = pending.pop()
            if number not in found and number != without:
                found.add(number)
                pending += self.after(number)
        return found

    def up_to(self, start: int, ends: Set[int]) -> set[int]:
        """Return the block `start` and those that it leads to before one of `ends`."""
        found = {start}
        pending = [start]
        while pending:
            for one in self.after(pending.pop()):
                if one not in ends and one not in found:
                    found.add(one)
                    pending.append(one)
        return found

    def leads(self, head: int, blocks: Set[int]) -> set[int]:
        """Return where `blocks`, which begin at `head`, lead: to others or back to `head`."""
        return {after for number in blocks for after in self.after(number) if after not in blocks or after == head}

    def goes_around(self, head: int, blocks: Set[int]) -> bool:
        """Whether some of `blocks` lead to themselves without leaving these and without coming through `head`."""
        ends = {head} | self.leads(head, blocks)
        return any(
            number in self.up_to(after, ends)
            for number in blocks - {head}
            for after in self.after(number)
            if after not in ends
        )

    def meeting_point(self, number: int) -> int | None:
        """Return the first block that all ways from a block come through, None if some end before or none ends."""
        if number not in self._meeting:
            self._meeting[number] = self._first_met(number)
        return self._meeting[number]

    def _first_met(self, number: int) -> int | None:
        if number in self._ending:
            return None
        after = self.after(number)
        # A block that all ways come through is on this one, too, and of several, the first on it is the first on all.
        for one in self._way_to_an_end(after):
            if self._ending.isdisjoint(self.reached(after, without=one)):
                return one
        return None

    def _way_to_an_end(self, start: Iterable[int]) -> list[int]:
        """Return the blocks of a shortest way from one of `start` to one that can end, none if there is no such way."""
        came_from: dict[int, int | None] = dict.fromkeys(start)
        for number in (pending := list(came_from)):
            if number in self._ending:
                way = [number]
                while (one := came_from[way[-1]]) is not None:
                    way.append(one)
                return way[::-1]
            for one in self.after(number):
                if one not in came_from:
                    came_from[one] = number
                    pending.append(one)
        return []

    def _can_end(self, number: int) -> bool:
        last = self.last(number)
        ends = last is not None and opcode_of(last.opcode).control in (Control.END, Control.STOP)
        return ends or not self.after(number)


# ---- registers ----


def find_distances(
    region: Region, before: Sequence[Instruction], own: Mapping[str, int | None]
) -> tuple[dict[str, int | None], set[int]]:
    """Return the distance of each register, None of those that have none, and the blocks that not all threads run."""
    uneven: set[int] = set()
    while True:
        found = _with_uneven(region, before, own, uneven)
        more = set(uneven)
        for number in region.blocks:
            if number not in uneven and region.branches(number) and not _is_even(region, number, found):
                more |= region.reached(region.after(number), without=region.meeting_point(number))
        if more == uneven:
            return found, uneven
        uneven = more


def _with_uneven(
    region: Region, before: Sequence[Instruction], own: Mapping[str, int | None], uneven: set[int]
) -> dict[str, int | None]:
    """Return the distances of registers if not all threads come through the blocks `uneven`."""
    found = dict(own)  # None: it has none; not in it: not known yet
    registers = region.flow.function.registers
    together = list(before)
    for number in region.blocks:
        if number in uneven:
            found |= dict.fromkeys(name for one in region.instructions(number) for name in writes(one))
        else:
            together += region.instructions(number)
    written = [(name, one) for one in together for name in writes(one)]
    readers: dict[str, list[int]] = {}
    for number, (_, one) in enumerate(written):
        for name in reads(one):
            readers.setdefault(name, []).append(number)
    waiting = deque(range(len(written)))
    is_waiting = [True] * len(written)

    def set_distance(name: str, distance: int | None) -> None:
        found[name] = distance
        for number in readers.get(name, ()):
            if not is_waiting[number]:
                is_waiting[number] = True
                waiting.append(number)

    while True:
        while waiting:
            is_waiting[number := waiting.popleft()] = False
            name, one = written[number]
            known, distance = _of(one, found, region)
            if known:
                if name not in registers or (distance and not _is_whole(registers[name], one)):
                    distance = None
                if name not in found or found[name] not in (distance, None):
                    set_distance(name, distance if name not in found else None)
        # What is still unknown is only ever set from itself.
        unknown = {name: None for name, _ in written if name not in found}
        if not unknown:
            return found
        for name in unknown:
            set_distance(name, None)


def _is_even(region: Region, number: int, found: Mapping[str, int | None]) -> bool:
    last = region.last(number)
    assert last is not None
    if opcode_of(last.opcode).control is not Control.BRANCH or last.guard is None:
        return False
    return found.get(last.guard.name) == 0


_Known = tuple[bool, int | None]
"""Whether a distance is known yet, and what it is: None if there is none."""
_UNKNOWN: _Known = (False, None)
_NONE: _Known = (True, None)


def _operand(operand: Operand, found: Mapping[str, int | None]) -> _Known:
    if isinstance(operand, Immediate | Symbol):
        return True, 0
    if not isinstance(operand, Register):
        return _NONE
    name = operand.name
    if name in found:
        return True, found[name]
    if name == "%tid.x":
        return True, 1
    if name.startswith(SAME_IN_ROW):
        return True, 0
    return _NONE if name in SPECIAL or name == "_" else _UNKNOWN


def _of(i: Instruction, found: Mapping[str, int | None], region: Region) -> _Known:
    """Return the distance of what an instruction sets."""
    if len(writes(i)) != 1 or not isinstance(i.operands[0], Register):
        return _NONE
    if i.guard is not None:
        known, guard = _operand(i.guard, found)
        if not known or guard != 0:
            return known, None
    if i.opcode == "ld":
        return _loaded(i, found, is_early=id(i) in region.early)
    if i.opcode not in PURE or not ORDERED.isdisjoint(i.modifiers):
        return _NONE
    sources = [_operand(operand, found) for operand in i.operands[1:]]
    if any(known and distance is None for known, distance in sources):
        return _NONE
    if not all(known for known, _ in sources):
        return _UNKNOWN
    by = [distance or 0 for _, distance in sources]
    if not any(by):
        return True, 0
    check = region.to_check(i, by)
    return True, 0 if check is not None and check.same else _linear(i, by, is_checked=check is not None)


def _loaded(i: Instruction, found: Mapping[str, int | None], *, is_early: bool) -> _Known:
    """Return the distance of what is loaded: none writes parameters and constants while a kernel runs.

    What threads load from one address before they write anything (`is_early`) they may all load before any writes.
    """
    source = getattr(i.operands[1], "base", None)
    if "param" in i.modifiers:
        return (True, 0) if loads_parameter(i) else _NONE
    if not ("const" in i.modifiers or is_early) or source is None:
        return _NONE
    known, distance = _operand(source, found)
    return (known, distance) if distance == 0 else (known, None)


def _is_whole(declared: str, i: Instruction) -> bool:
    """Whether a register declared with a type holds the integer that an instruction sets it to, and no more."""
    size = 8 if "wide" in i.modifiers else type_bytes(types_of(i)[0])
    return declared[0] in "bus" and type_bytes(declared) == size


def _linear(i: Instruction, by: list[int], *, is_checked: bool) -> int | None:
    """Return the distance of a sum or a product, of operands that are at the distances `by`."""
    types = types_of(i)
    if not types or not _INTEGERS.issuperset(types) or {"sat", "hi", "x"} & {*i.modifiers}:
        return None
    opcode, sources = i.opcode, i.operands[1:]
    wide = "wide" in i.modifiers
    bits = 64 if wide else 8 * type_bytes(types[0])
    distance: int | None = None
    if opcode in ("mov", "cvta", "cvt") and len(by) == 1:
        widens = type_bytes(types[0]) > type_bytes(types[-1])
        distance = by[0] if is_checked or not widens else None
    elif opcode in ("neg", "not"):
        distance = -by[0]
    elif opcode in ("add", "sub"):
        distance = by[0] + by[1] if opcode == "add" else by[0] - by[1]
    elif opcode == "rem" and is_checked:
        distance = by[0]
    elif opcode == "selp":
        distance = by[0] if by[0] == by[1] and not by[2] else (by[0] or by[1]) if is_checked else None
    elif opcode == "shl" and isinstance(sources[1], Immediate):
        amount = int(sources[1].value)
        distance = by[0] << amount if 0 <= amount < 32 else None
    elif opcode in ("mul", "mad") and (is_checked if wide else "lo" in i.modifiers):
        distance = _product(sources, by, types[-1])
    return None if distance is None else (distance + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _product(sources: Sequence[Operand], by: list[int], type_name: str) -> int | None:
    """Return the distance of the product of two operands of a type, plus that of what is added to it."""
    if not (by[0] or by[1]):
        return sum(by[2:])
    factor, distance = (sources[1], by[0]) if by[0] else (sources[0], by[1])
    if not isinstance(factor, Immediate):
        return None
    value = int(factor.value) % (1 << 8 * type_bytes(type_name))
    if type_name[0] == "s" and value >> 8 * type_bytes(type_name) - 1:
        value -= 1 << 8 * type_bytes(type_name)
    return distance * value + sum(by[2:])


def whole_check(i: Instruction, by: list[int]) -> DistanceCheck | None:
    """Return what must hold for an instruction that is not linear to have a distance, None if none can have it.

    `by` are the distances of what it reads. The check is of all threads that run the region together.
    """
    types = types_of(i)
    if sum(map(bool, by)) != 1 or not types or not _INTEGERS.issuperset(types):
        return None
    place = next(n for n, distance in enumerate(by) if distance)
    operand, distance, source = i.operands[1 + place], by[place], types[-1]
    bits = source[1:]
    if not isinstance(operand, Register) or operand.negated or operand.name in SPECIAL:
        return None
    if (MOST - 1) * abs(distance) >= 1 << int(bits) - 1:
        return None
    if i.opcode == "setp" and len(by) == 2 and _COMPARISONS.intersection(i.modifiers):
        signed = source[0] == "s" and not {"lo", "ls", "hi", "hs"} & {*i.modifiers}
        return DistanceCheck(operand.name, distance, f"{'s' if signed else 'u'}{bits}", same=True)
    if i.opcode in ("div", "shr") and place == 0:  # the result only grows with the operand, or only falls
        return DistanceCheck(operand.name, distance, f"{'s' if source[0] == 's' else 'u'}{bits}", same=True)
    if (i.opcode == "cvt" and len(types) == 2 and type_bytes(types[0]) > type_bytes(source)) or (
        i.opcode in ("mul", "mad") and "wide" in i.modifiers and place < 2
    ):
        return None if source[0] == "b" else DistanceCheck(operand.name, distance, source, same=False)
    return None


def _no_quotients(i: Instruction, by: list[int]) -> DistanceCheck | None:
    """Return what :func:`whole_check` does, None for quotients."""
    return None if i.opcode in ("div", "shr") else whole_check(i, by)


def check_of(i: Instruction, distances: Mapping[str, int], to_check: ToCheck = whole_check) -> DistanceCheck | None:
    """Return what must be checked for an instruction whose result is scalar, None if nothing must."""
    by = [_operand(operand, distances)[1] or 0 for operand in i.operands[1:]]
    return to_check(i, by) if any(by) else None


def place_in_line(i: Instruction) -> tuple[Operand, Operand] | None:
    """Return the texture and the place of a fetch at an integer place of a line, None for other instructions."""
    address = i.operands[1] if i.opcode == "tex" else None
    if not isinstance(address, Address) or not address.coordinates or address.base is None:
        return None
    if "1d" not in i.modifiers or types_of(i)[-1] != "s32":
        return None
    return address.base, elements(address.coordinates[-1])[0]


def distance_in_line(i: Instruction, found: Mapping[str, int | None]) -> int | None:
    """Return the distance of the places of a line at which neighbors fetch from one texture, None if they do not."""
    fetched = place_in_line(i)
    if fetched is None or i.guard is not None:
        return None
    (_, texture), (_, distance) = (_operand(operand, found) for operand in fetched)
    return distance if texture == 0 else None


# ---- parts ----


def find_parts(
    region: Region, uneven: set[int], found: Mapping[str, int | None], *, detours: bool = False
) -> dict[int, Part] | None:
    """Return the parts by their heads, with `detours` or without, None if some part does not lead to one place."""
    parts: dict[int, Part] = {}
    pending = [region.first]
    while pending:
        head = pending.pop()
        if head in parts:
            continue
        part = _part(region, head, uneven, found, detours=detours)
        if part is None:
            return None
        parts[head] = part
        pending += part.after
    return parts


def _part(
    region: Region, head: int, uneven: set[int], found: Mapping[str, int | None], *, detours: bool
) -> Part | None:
    chain: list[int] = []
    blocks: set[int] = set()
    at = head
    while True:
        blocks.add(at)
        after: set[int]
        if at not in uneven:
            chain.append(at)
            if region.branches(at) and _is_even(region, at, found):
                return Part(head, tuple(chain), frozenset(blocks), tuple(region.after(at)))
        # What some threads run lies between here and where all are together again.
        some = {at}
        pending = [at]
        after = set()
        while pending:
            for one in region.after(pending.pop()):
                if one not in uneven:
                    after.add(one)
                elif one not in some:
                    some.add(one)
                    pending.append(one)
        blocks |= some
        if len(after) > 1:
            return None
        if not after:
            return Part(head, tuple(chain), frozenset(blocks), ())
        (following,) = after
        loops = _own_loops(region, some - {at} if at not in uneven else some, following, found)
        if detours and not loops:
            loops = _detour(region, at, some - {at}, following)
        if loops and head not in uneven:
            before = region.up_to(at, {loop.head for loop in loops} | after)
            return Part(head, tuple(chain), frozenset((blocks - some) | before), (following,), loops)
        if following == head or not region.before[following] <= blocks:
            return Part(head, tuple(chain), frozenset(blocks), (following,))
        at = following


def _detour(region: Region, at: int, some: set[int], end: int) -> tuple[Part, ...]:
    """Return the blocks `some`, which threads that branch at the block `at` may pass by, as a loop of one round.

    It is skipped if no thread of those that run together comes there: what is done for large numbers in ``sinf``, say.
    There is none if it is short, or does anything but compute.
    """
    heads = set(region.after(at)) & some
    if len(heads) != 1 or end not in region.after(at) or not region.loops.keys().isdisjoint(some):
        return ()
    (head,) = heads
    code = [one for number in some for one in region.instructions(number)]
    enters = any(not region.before[number] <= some for number in some - heads) or region.before[head] != {at}
    if (
        enters
        or len(code) < _DETOUR
        or not all(one.opcode in PURE | {"bra"} and "cc" not in one.modifiers for one in code)
    ):
        return ()
    return (Part(head, (), frozenset(some), (), is_detour=True),)


def _own_loops(region: Region, some: set[int], end: int, found: Mapping[str, int | None]) -> tuple[Part, ...]:
    """Return the loops among the blocks `some` that each thread leaves by itself, all on the way to the block `end`.

    What follows them there may be a last one, of one round.

    There are none if one of them does anything but compute, or load what is alike for all threads in it, or leads back
    to another: then each thread goes its way.
    """
    heads = [one for one in region.order if one in some and one in region.loops and region.loops[one] <= some]
    if not heads:
        return ()
    if loops := _loops(region, heads, end, found) or _nest(region, heads, end):
        return loops
    last = _last(region, heads, some, end)
    if last is None:
        return ()
    loops = _loops(region, heads, last.head, found) or _nest(region, heads, last.head)
    return (*loops, last) if loops else ()


def _nest(region: Region, heads: Sequence[int], end: int) -> tuple[Part, ...]:
    """Return the loop that begins at the first of `heads` and has all the others inside, if it is worth it."""
    turns = find_nest(region, heads, end, lambda one: _is_computed(one, or_branches=True))
    inside = tuple(Part(turn.head, (), turn.blocks, (), is_detour=not turn.is_loop) for turn in turns)
    return (Part(heads[0], (), frozenset().union(*(turn.blocks for turn in turns)), (), inside),) if turns else ()


def _loops(region: Region, heads: Sequence[int], end: int, distances: Mapping[str, int | None]) -> tuple[Part, ...]:
    """Return the loops that begin at `heads`, and lead to the block `end`."""
    found: list[Part] = []
    for place, head in enumerate(heads):
        blocks = region.up_to(head, {*heads, end})
        leads = region.leads(head, blocks)
        # That some thread is in a loop is known where the first one begins.
        alike = None if place else find_alike(region, head, blocks, distances, _is_computed)
        once = () if alike is None else alike.code
        computes = all(
            index in once or _is_computed(region.code[index], or_branches=True)
            for number in blocks
            for index in region.places(number)
        )
        if not computes or region.goes_around(head, blocks) or not leads <= {head, *heads[place + 1 :], end}:
            return ()
        found.append(Part(head, (), frozenset(blocks), (), alike=alike))
    return tuple(found)


def _last(region: Region, heads: Sequence[int], some: set[int], end: int) -> Part | None:
    """Return what threads do after the loops that begin at `heads`, all of it on the way to the block `end`."""
    head = region.meeting_point(heads[-1])
    if head is None or head == end or head not in some:
        return None
    blocks = region.up_to(head, {end})
    enters = any(not region.before[number] <= blocks for number in blocks - {head})
    ends = any(not region.after(number) for number in blocks)
    if enters or ends or not region.loops.keys().isdisjoint(blocks):
        return None
    return Part(head, (), frozenset(blocks), (), is_detour=True)


def _is_computed(i: Instruction, *, or_branches: bool = False) -> bool:
    """Whether all that an instruction does is to compute, in a way that LLVM has vectors of."""
    return i.opcode in _COMPUTED and "cc" not in i.modifiers and (or_branches or i.opcode != "bra")


def _is_worth_it(region: Region, parts: Mapping[int, Part], found: Mapping[str, int | None], *, by_row: bool) -> bool:
    """Whether threads that run a region together go around loops, and LLVM can do the rounds of several at once.

    Rows do so for the sake of their accesses, too, even with atomic updates, of which LLVM makes no vectors.
    """
    loops = [one for part in parts.values() for loop in part.loops for one in loop.loops or (loop,)]
    rounds = [part for part in parts.values() if _comes_back(parts, part)] + loops
    written = sum(len(region.instructions(number)) for part in [*parts.values(), *loops] for number in part.blocks)
    if not rounds or written > _MOST_WRITTEN:
        return False
    live = {name for part in rounds for name in region.flow.blocks[part.head].live_in}
    kept = {name for name in live & found.keys() if found[name] is None}  # others stay in their slots, or are scalar
    if len(kept) > (_MOST_KEPT_OF_ROWS if by_row else _MOST_KEPT) or (by_row and loops):
        return False
    for part in rounds:
        for number in part.blocks:
            for one in region.instructions(number):
                fetches = not by_row and number in part.chain and distance_in_line(one, found) is not None
                if not (fetches or _is_side_by_side(one, by_row=by_row)):
                    return False
            if number in _reached_inside(region, part, region.after(number)) and number not in part.chain:
                return False  # a loop of each thread's own
    return True


def _comes_back(parts: Mapping[int, Part], part: Part) -> bool:
    found: set[int] = set()
    pending = list(part.after)
    while pending:
        head = pending.pop()
        if head not in found:
            found.add(head)
            pending += parts[head].after
    return part.head in found


def _reached_inside(region: Region, part: Part, start: Iterable[int]) -> set[int]:
    found: set[int] = set()
    pending = list(start)
    while pending:
        number = pending.pop()
        if number in part.blocks and number != part.head and number not in found:
            found.add(number)
            pending += region.after(number)
    return found


def _is_side_by_side(i: Instruction, *, by_row: bool) -> bool:
    if by_row and i.opcode in ("atom", "red"):
        return ORDERED.isdisjoint({*i.modifiers} - {"relaxed"})
    return i.opcode in _SIDE_BY_SIDE and ORDERED.isdisjoint(i.modifiers)
