"""What pointers and indices are made of: arguments, and sums of products."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from cudatool.triton_order.text import VALUE, Block, Operation, walk

__all__ = ["Polynomial", "Values", "is_varying", "sorted_atoms", "total"]

_SAME: Final = (
    "tt.splat",
    "tt.broadcast",
    "ttg.convert_layout",
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
    "arith.index_cast",
)
_ELEMENTWISE: Final = ("arith.", "math.", "tt.fp_to_fp")
_MOST: Final = 64  # monomials of a polynomial; one with more is not followed
_DEEPEST: Final = 150  # how far a value is followed back

_Product = tuple[str, ...]
Polynomial = Mapping[_Product, int]
"""Sums of products: how often each product of atoms counts. An atom is a number that is not followed further: uniform
(``u``), of a tensor (``t``), or the place in a block along a dimension (``r SIZE DIMENSION``)."""


def is_varying(atom: str) -> bool:
    """Return whether an atom differs from element to element of a tensor."""
    return atom[0] in "rt"


@dataclass(eq=False, slots=True)
class _Carried:
    """A value that a loop hands on to its next round."""

    loop: Operation
    start: str
    following: str


class Values:
    """What a function's values are made of."""

    def __init__(self, function: Operation) -> None:
        self._function = function
        self.defined: dict[str, Operation] = {}
        self.carried: dict[str, _Carried] = {}
        self.counted: dict[str, Operation] = {}  # what loops count with
        self.either: dict[str, tuple[str, ...]] = {}  # results of branches and loops
        self.loops: dict[str, frozenset[int]] = {}  # of an atom: those in which it changes
        self.arguments = set(re.findall(rf"({VALUE}): ", function.text))
        self.pointers = set(re.findall(rf"({VALUE}): !tt\.ptr", function.text))
        self._polynomials: dict[str, Polynomial | None] = {}
        self._depth = 0
        self._roots: dict[str, frozenset[str]] = {}
        for operation in walk(function):
            for name in operation.results:
                self.defined[name] = operation
            if operation.name == "scf.for":
                self._note_for(operation)
            elif operation.name == "scf.while":
                self._note_while(operation)
            elif operation.name == "scf.if" and operation.results:
                yields = [_last(region, "scf.yield") for region in operation.regions]
                self.either |= {name: tuple(y[at] for y in yields) for at, name in enumerate(operation.results)}

    def _note_for(self, loop: Operation) -> None:
        index = loop.operands[0]
        self.counted[index] = loop
        given = re.search(r"iter_args\((.*?)\)", loop.text)
        if given is not None:
            yields = _last(loop.regions[0], "scf.yield")
            for at, (name, start) in enumerate(re.findall(rf"({VALUE}) = ({VALUE})", given[1])):
                self.carried[name] = _Carried(loop, start, yields[at])
                self.either[loop.results[at]] = (start, yields[at])

    def _note_while(self, loop: Operation) -> None:
        before, after = loop.regions
        passed, yields = _last(before, "scf.condition")[1:], _last(after, "scf.yield")
        for at, (name, start) in enumerate(re.findall(rf"({VALUE}) = ({VALUE})", loop.text.partition(" : ")[0])):
            self.carried[name] = _Carried(loop, start, yields[at])
        self.either |= {name: (passed[at],) for at, name in enumerate(loop.results)}
        self.either |= {name: (passed[at],) for at, name in enumerate(after[0].arguments)}

    @cached_property
    def _users(self) -> dict[str, list[Operation]]:
        found: dict[str, list[Operation]] = {}
        for operation in walk(self._function):
            for name in operation.operands:
                found.setdefault(name, []).append(operation)
        return found

    def stays(self, name: str) -> bool:
        """Whether a value has no effect but on elements that are stored, each by the thread that has it."""
        seen = {name}
        pending = [name]
        while pending:
            one = pending.pop()
            for user in self._users.get(one, ()):
                if user.name == "tt.store":
                    if one in user.operands[:1] + user.operands[2:]:
                        return False
                elif not user.name.startswith(_ELEMENTWISE) or user.regions:
                    return False
                new = [result for result in user.results if result not in seen]
                seen.update(new)
                pending += new
        return True

    def below(self, mask: str) -> list[tuple[Polynomial, Polynomial]]:
        """Return what is less than what where a mask holds."""
        operation = self.defined.get(mask)
        if operation is None:
            return []
        if operation.name == "arith.andi":
            return [pair for one in operation.operands for pair in self.below(one)]
        if operation.name in _SAME:
            return self.below(operation.operands[0])
        less = operation.text.startswith(("arith.cmpi slt, ", "arith.cmpi ult, "))
        pair = [self.polynomial(one) for one in operation.operands] if less else [None, None]
        return [] if pair[0] is None or pair[1] is None else [(pair[0], pair[1])]

    def roots(self, pointer: str) -> frozenset[str]:
        """Return the arguments of which a pointer may be one plus a number; "" is any memory."""
        if pointer not in self._roots:
            found: set[str] = set()
            seen: set[str] = set()
            pending = [pointer]
            while pending:
                name = pending.pop()
                if name in seen:
                    continue
                seen.add(name)
                if name in self.pointers:
                    found.add(name)
                elif name in self.carried:
                    pending += [self.carried[name].start, self.carried[name].following]
                elif name in self.either:
                    pending += self.either[name]
                else:
                    bases = self._bases(name)
                    pending += bases
                    found |= set() if bases else {""}
            self._roots[pointer] = frozenset(found)
        return self._roots[pointer]

    def _bases(self, name: str) -> list[str]:
        """Return of which of its operands a pointer is made; none if that is not known."""
        operation = self.defined.get(name)
        if operation is None:
            return []
        if operation.name == "arith.select":
            return operation.operands[1:3]
        if operation.name in ("tt.addptr", "tt.bitcast", "tt.expand_dims", "tt.reshape", "tt.trans", *_SAME):
            return operation.operands[:1]
        return []

    def polynomial(self, name: str) -> Polynomial | None:
        """Return what a number is, or by how much a pointer is above its argument; None if not known."""
        if name not in self._polynomials:
            self._polynomials[name] = None  # while it is looked for
            self._depth += 1
            found = self._find(name) if self._depth < _DEEPEST else None
            self._depth -= 1
            self._polynomials[name] = found if found is None or len(found) <= _MOST else None
        return self._polynomials[name]

    def _find(self, name: str) -> Polynomial | None:
        if name in self.pointers:
            return {}
        if name in self.counted:
            return self._count(name)
        if name in self.carried:
            return self._carry(name)
        operation = self.defined.get(name)
        if operation is not None and name not in self.either:
            return self._computed(name, operation)
        return None if self._is_pointer(name) else self._atom(name)

    def _atom(self, name: str) -> Polynomial:
        operation = self.defined.get(name)
        is_scalar = name in self.arguments or (operation is not None and operation.gives_scalars)
        atom = ("u" if is_scalar else "t") + name
        self.loops[atom] = operation.loops if operation is not None else frozenset()
        if name in self.carried:
            self.loops[atom] = self.carried[name].loop.loops | {self.carried[name].loop.line}
        elif operation is None and name not in self.arguments:
            self.loops[atom] = frozenset((-1,))  # of another block: that is not looked at
        return {(atom,): 1}

    def _round(self, name: str, loop: Operation) -> str:
        """Return the atom that counts a loop's rounds."""
        atom = "u" + name
        self.loops[atom] = loop.loops | {loop.line}
        return atom

    def _count(self, name: str) -> Polynomial | None:
        loop = self.counted[name]
        start, step = (self.polynomial(one) for one in (loop.operands[1], loop.operands[3]))
        if start is None or step is None:
            return None
        return total(start, _product(step, {(self._round(name, loop),): 1}))

    def _carry(self, name: str) -> Polynomial | None:
        """Return what a loop hands on: where it starts, and what each round adds, if that is uniform."""
        one = self.carried[name]
        outside = self._polynomials.copy()
        itself = self._atom(name)
        self._polynomials[name] = itself
        following = self.polynomial(one.following)
        self._polynomials = outside  # what was found meanwhile holds inside of the loop only
        if following is None:
            return None
        added = total(following, itself, -1)
        if any(is_varying(atom) for product in added for atom in product):
            return None if self._is_pointer(name) else itself
        start = self.polynomial(one.start)
        if start is None:
            return None
        # What rounds add may differ from round to round, but for factors that no round changes.
        inside = one.loop.loops | {one.loop.line}
        rounds: Counter[_Product] = Counter()
        for at, (product, times) in enumerate(added.items()):
            fixed = tuple(atom for atom in product if inside.isdisjoint(self.loops[atom]))
            rounds[sorted_atoms((self._round(f"{name}+{at}", one.loop), *fixed))] += times
        return total(start, rounds)

    def _is_pointer(self, name: str) -> bool:
        return bool(self.roots(name) - {""})

    def _computed(self, name: str, operation: Operation) -> Polynomial | None:
        kind, operands = operation.name, operation.operands
        if kind == "tt.make_range":
            start, end = (re.search(rf"{one} = (-?\d+)", operation.text) for one in ("start", "end"))
            assert start is not None and end is not None
            atom = f"r {int(end[1]) - int(start[1])} 0"
            self.loops[atom] = frozenset()
            return total({(atom,): 1}, {(): int(start[1])})
        if kind == "arith.constant":
            number = re.match(r"arith\.constant (?:dense<)?(-?\d+)>? : ", operation.text)
            return self._atom(name) if number is None else total({}, {(): int(number[1])})
        if kind in _SAME:
            return self.polynomial(operands[0])
        if kind == "tt.expand_dims":
            return self._expanded(operation)
        if kind in ("tt.addptr", "arith.addi", "arith.subi", "arith.muli"):
            one, other = (self.polynomial(each) for each in operands[:2])
            if one is None or other is None:
                return None
            if kind == "arith.muli":
                return _product(one, other)
            return total(one, other, -1 if kind == "arith.subi" else 1)
        # A pointer of any other kind has no single argument that it is above.
        return None if self._is_pointer(name) else self._atom(name)

    def _expanded(self, operation: Operation) -> Polynomial | None:
        whole = self.polynomial(operation.operands[0])
        axis = re.search(r"axis = (\d+)", operation.text)
        if whole is None or axis is None:
            return None
        found: Counter[_Product] = Counter()
        for product, times in whole.items():
            atoms = []
            for atom in product:
                if atom[0] == "r":
                    _, size, dimension = atom.split()
                    moved = f"r {size} {int(dimension) + (int(dimension) >= int(axis[1]))}"
                else:
                    moved = f"{atom}^{axis[1]}" if atom[0] == "t" else atom
                self.loops[moved] = self.loops[atom]
                atoms.append(moved)
            found[sorted_atoms(atoms)] += times
        return found


def _last(region: list[Block], name: str) -> list[str]:
    """Return the operands of a region's last operation."""
    last = region[-1].operations[-1]
    assert last.name == name
    return last.operands


def sorted_atoms(atoms: Iterable[str]) -> _Product:
    return tuple(sorted(atoms))


def total(one: Polynomial, other: Polynomial, sign: int = 1) -> Polynomial:
    found = dict(one)
    for product, times in other.items():
        found[product] = found.get(product, 0) + sign * times
    return {product: times for product, times in found.items() if times}


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    found: dict[_Product, int] = {}
    for a, m in one.items():
        for b, n in other.items():
            key = sorted_atoms(a + b)
            found[key] = found.get(key, 0) + m * n
    return {product: times for product, times in found.items() if times}
