"""Where a program's accesses to global memory need a barrier between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

from cudatool.triton_order.text import LOCATION, LOOPS, Operation, Parser
from cudatool.triton_order.values import Polynomial, Values, is_varying, sorted_atoms, total

__all__ = ["ordered"]

_BARRIERS: Final = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier")
_READS: Final = ("tt.load", "ttg.async_copy_global_to_local", "tt.atomic_load")
_WRITES: Final = ("tt.store", "tt.atomic_store")
_ATOMICS: Final = ("tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_poll")


def ordered(text: str, barrier: str) -> str:
    """Return a module of TTGIR with the barriers that its programs need on the software device; `text` if none.

    Parameters
    ----------
    text
        As Triton prints it, with or without locations.
    barrier
        The operation that waits for all threads of a program, as Triton prints it.
    """
    if "ttg.warp_specialize" in text:
        return text
    lines = text.splitlines()
    layouts = dict(re.findall(r"^(#\w+) = (#ttg?\.\w+<.*>)$", text, re.MULTILINE))
    before: set[int] = set()
    parser = Parser()
    for number, line in enumerate(lines):
        parser.read(number, line)
    for function in parser.functions:
        before |= _Order(function, layouts).barriers()
    if not before:
        return text
    found = []
    for number, line in enumerate(lines):
        if number in before:
            # That of the access; a loop's stands at its end.
            located = filter(None, map(LOCATION.search, lines[number:]))
            found.append(barrier + next((one[0] for one in located), ""))
        found.append(line)
    return "\n".join(found) + "\n"


@dataclass(eq=False, slots=True)
class _Access:
    """What an operation does to global memory.

    Attributes
    ----------
    roots
        The arguments whose memory it may be; "" is any.
    index
        By how much the pointer is above its argument, in elements; None if that is not known.
    type
        The pointer's, with the layout that says which thread has which element.
    below
        What is less than what for the elements that are accessed, by the mask.
    """

    operation: Operation
    reads: bool
    writes: bool
    atomic: bool
    roots: frozenset[str]
    index: Polynomial | None
    type: str
    below: list[tuple[Polynomial, Polynomial]] = field(default_factory=list)


_Pending = dict[_Access, frozenset[int]]
"""Accesses since the last barrier, and the loops in which they are of an earlier round."""


class _Order:
    """Finds where a function needs barriers."""

    def __init__(self, function: Operation, layouts: Mapping[str, str]) -> None:
        self._function = function
        self._layouts = layouts
        self._values = Values(function)
        self._accesses: dict[Operation, _Access | None] = {}
        self._judged: dict[tuple[_Access, _Access, frozenset[int]], bool] = {}
        self._before: set[int] = set()

    def barriers(self) -> set[int]:
        """Return the lines before which a barrier is needed."""
        blocks = self._function.regions[0] if self._function.regions else []
        arriving: dict[str, _Pending] = {}
        for number, block in enumerate(blocks):
            # Triton's branches between blocks only lead on, to where an early ``return`` of the program ends.
            pending = self._run(block.operations, arriving.get(block.label, {}) if number else {})
            for label in re.findall(r"\^(\w+)", block.operations[-1].text) if block.operations else ():
                arriving[label] = _either(arriving.get(label, {}), pending)
        return self._before

    def _run(self, operations: Iterable[Operation], pending: _Pending) -> _Pending:
        """Put barriers where operations need them after what is `pending`; return what is pending then."""
        for one in operations:
            if one.name in _BARRIERS or self._waits(one):
                pending = {}
            elif one.name in LOOPS:
                pending = self._run_loop(one, pending)
            elif one.name == "scf.if":
                ways = [self._run(region[0].operations, pending) for region in one.regions]
                pending = _either(*ways) if len(ways) > 1 else _either(ways[0], pending)
            else:
                access = self._access(one)
                if access is not None:
                    if any(self._meet(other, access, loops) for other, loops in pending.items()):
                        self._before.add(one.line)
                        pending = {}
                    pending = pending | {access: frozenset()}
        return pending

    def _run_loop(self, loop: Operation, pending: _Pending) -> _Pending:
        if self._round(loop, pending)[1] != self._round(loop, {})[1]:
            self._before.add(loop.line)  # once, rather than in each round
            pending = {}
        again: _Pending = {}
        while True:
            (left, handed_on), needed = self._round(loop, _either(pending, again))
            more = _either(again, {one: loops | {loop.line} for one, loops in handed_on.items()})
            if more == again:
                self._before |= needed
                return _either(pending, left) if loop.name == "scf.for" else left
            again = more

    def _round(self, loop: Operation, pending: _Pending) -> tuple[tuple[_Pending, _Pending], set[int]]:
        """Run one round; return what is pending where the loop ends and where it goes on, and the new barriers."""
        kept, self._before = self._before, set()
        left = self._run(loop.regions[0][0].operations, pending)
        handed_on = self._run(loop.regions[1][0].operations, left) if loop.name == "scf.while" else left
        needed, self._before = self._before, kept
        return (left, handed_on), needed

    def _waits(self, one: Operation) -> bool:
        """Whether an operation gives all threads what is known only when all warps have come to it."""
        if one.name != "tt.reduce" or not one.gives_scalars:
            return False
        source = re.search(r"\((tensor<[^)]*>)[,)]", one.types)
        layout = source and self._layouts.get(source[1].rpartition(", ")[2].rstrip(">"), "")
        warps = re.search(r"warpsPerCTA = \[([\d, ]+)\]", layout or "")
        return bool(source and warps and prod(map(int, warps[1].split(","))) > 1 and self._has_one_owner(source[1]))

    def _access(self, one: Operation) -> _Access | None:
        if one not in self._accesses:
            self._accesses[one] = self._find_access(one)
        return self._accesses[one]

    def _find_access(self, one: Operation) -> _Access | None:
        anything = frozenset(("",))
        if one.name == "tt.call":
            return _Access(one, True, True, False, anything, None, "")
        if one.name == "tt.elementwise_inline_asm":
            if "pure = true" in one.text or "!tt.ptr" not in one.text:
                return None
            return _Access(one, True, True, False, anything, None, "")
        reads, writes, atomic = one.name in _READS, one.name in _WRITES, one.name in _ATOMICS
        if not (reads or writes or atomic):
            return None
        pointer = one.operands[0]
        roots = self._values.roots(pointer)
        index = self._values.polynomial(pointer) if len(roots) == 1 and "" not in roots else None
        kind = re.search(r"tensor<[\dx]+x!tt\.ptr<\w+>, (?:#\w+|#ttg\.\w+<\{.*?\}>)>|!tt\.ptr<\w+>", one.types)
        mask = one.operands[1 if one.name == "tt.load" else 2 :][:1] if one.name in ("tt.load", "tt.store") else []
        below = [pair for each in mask for pair in self._values.below(each)]
        return _Access(one, reads, writes, atomic, roots, index, kind[0] if kind else "", below)

    def _meet(self, first: _Access, second: _Access, earlier: frozenset[int]) -> bool:
        """Whether two threads may use a byte, one in each access, of which one writes."""
        if (first.atomic and second.atomic) or not any(one.writes or one.atomic for one in (first, second)):
            return False
        if "" not in first.roots | second.roots and first.roots.isdisjoint(second.roots):
            return False
        key = (first, second, earlier)
        if key not in self._judged:
            self._judged[key] = not self._apart(first, second, earlier)
        return self._judged[key]

    def _apart(self, first: _Access, second: _Access, earlier: frozenset[int]) -> bool:
        """Whether no two threads use a byte, one in each of two accesses above the same argument."""
        if first.index is None or second.index is None or first.roots != second.roots:
            return False
        one, other = self._of_round(first.index, earlier), second.index
        difference = total(one, other, -1)
        varying = [_varying(each) for each in (one, other)]
        uniform = total(difference, total(varying[0], varying[1], -1), -1)
        if first.type == second.type and varying[0] == varying[1]:
            loads = [one for one in (first, second) if one.reads]
            has_owner = self._has_one_owner(first.type) or all(
                self._values.stays(result) for one in loads for result in one.operation.results
            )
            moves = self._whole_blocks(uniform, varying[0], among_rows=not loads)
            if has_owner and moves and _spans(varying[0], first.type):
                return True
        if _element(first.type) != _element(second.type):
            return False
        spans = [_span(each) for each in varying]
        if spans[0] is None or spans[1] is None:
            return False
        back = total({}, uniform, -1)
        if not uniform.keys() - {()} and (uniform.get((), 0) > spans[1] or back.get((), 0) > spans[0]):
            return True
        # What a mask compares with may be another number in an earlier round.
        return not earlier and (
            _is_beyond(uniform, varying[1], second.below) or _is_beyond(back, varying[0], first.below)
        )

    def _of_round(self, index: Polynomial, earlier: frozenset[int]) -> Polynomial:
        """Return an index with other atoms for what an earlier round had, so that they are not taken for equal."""
        if not earlier:
            return index
        loops = self._values.loops
        found: Counter[tuple[str, ...]] = Counter()
        for product, times in index.items():
            atoms = []
            for atom in product:
                changes = not (earlier | {-1}).isdisjoint(loops[atom])
                atoms.append(f"{atom}'" if changes else atom)
                loops[atoms[-1]] = loops[atom]
            found[sorted_atoms(atoms)] += times
        return found

    def _whole_blocks(self, uniform: Polynomial, varying: Polynomial, *, among_rows: bool) -> bool:
        """Whether a uniform difference of two indices moves elements by whole blocks, or to other rows.

        If `among_rows`, a stride of the program's arguments leads to other rows.
        """
        blocks: dict[tuple[str, ...], dict[int, int]] = {}  # by what multiplies them: the sizes along their strides
        for product, times in varying.items():
            strides = tuple(atom for atom in product if not is_varying(atom))
            places = [atom for atom in product if is_varying(atom)]
            if len(places) != 1 or places[0][0] == "t" or times < 0:
                return not uniform
            blocks.setdefault(strides, {})[times] = int(places[0].split()[1])
        for product, times in uniform.items():
            within = [strides for strides in blocks if not Counter(strides) - Counter(product)]
            strides = max(within, key=len, default=())
            if among_rows and not strides and len(product) > 1 and self._has_argument(product):
                continue
            below = max((stride for stride in blocks.get(strides, {}) if stride <= abs(times)), default=0)
            if not below:
                if strides in blocks:
                    return False
                continue
            if times % (below * blocks[strides][below]):
                return False
        return True

    def _has_argument(self, product: Iterable[str]) -> bool:
        return any(atom[1:] in self._values.arguments for atom in product)

    def _has_one_owner(self, pointer: str) -> bool:
        """Whether each element of a tensor is in one thread, rather than copies in several."""
        shape, layout = re.match(r"tensor<((?:\d+x)+)", pointer), pointer.rpartition(", ")[2].rstrip(">")
        if shape is None:
            return False
        sizes = [int(one) for one in shape[1].split("x") if one]
        layout = self._layouts.get(layout, "")
        numbers = {
            name: [int(one) for one in found.split(",")] for name, found in re.findall(r"(\w+) = \[([\d, ]+)\]", layout)
        }
        if layout.startswith("#ttg.blocked"):
            parts = (numbers[name] for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA"))
            return all(prod(each) <= size for *each, size in zip(*parts, sizes, strict=True))
        if layout.startswith("#ttg.linear"):
            threads = layout.partition("lane = ")[2].partition("block = ")[0]
            return not re.search(r"\[0(?:, 0)*\]", threads)
        return False


def _either(*ways: _Pending) -> _Pending:
    found: _Pending = {}
    for pending in ways:
        for one, loops in pending.items():
            found[one] = found.get(one, frozenset()) | loops
    return found


def _varying(index: Polynomial) -> Polynomial:
    return {product: times for product, times in index.items() if any(map(is_varying, product))}


def _element(pointer: str) -> str:
    found = re.search(r"ptr<(\w+)>", pointer)
    return found[1] if found else pointer


def _spans(varying: Polynomial, pointer: str) -> bool:
    """Whether an index differs along each dimension of a tensor, or may."""
    shape = re.match(r"tensor<((?:\d+x)+)", pointer)
    sizes = [int(one) for one in shape[1].split("x") if one] if shape else []
    atoms = {atom for product in varying for atom in product}
    if any(atom[0] == "t" for atom in atoms):
        return True
    return all(size == 1 or f"r {size} {at}" in atoms for at, size in enumerate(sizes))


def _span(varying: Polynomial) -> int | None:
    """Return how far the largest index is from the smallest, None if not known or if the smallest is not 0."""
    span = 0
    for product, times in varying.items():
        if len(product) != 1 or product[0][0] != "r" or times < 0:
            return None
        span += times * (int(product[0].split()[1]) - 1)
    return span


def _is_beyond(distance: Polynomial, varying: Polynomial, below: Iterable[tuple[Polynomial, Polynomial]]) -> bool:
    """Whether indices from a distance on are beyond all those that a mask lets through, from 0 on."""
    for less, limit in below:
        if _varying(less) == varying and not _varying(limit):
            # varying < limit - (less - varying)
            rest = total(distance, total(limit, total(less, varying, -1), -1), -1)
            if not rest.keys() - {()} and rest.get((), 0) >= 0:
                return True
    return False
