"""Runs of matrix operations of a warp, made at one suspension.

Code for tensor cores is long rows of ``ldmatrix`` and ``mma`` without anything between them that needs their results.
A suspension for each would cost a loop over the threads and a copy of its operands. So such a row becomes one
instruction, a :class:`MatrixRun`: threads leave each register once, in an array of its own; the products are made one
after the other, and a matrix that several of them use, or that one hands on to the next, stays as it is in between.

What stands between the operations and does not need them, such as the zeros that sums begin with, moves before the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from cudatool.ptx import Address, Function, Instruction, Operand, Register, VectorOperand, elements, opcode_of
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.collective import SUSPENSIONS, Kind, Suspension, read_array
from cudatool.sim.jit.dense import DENSE, transfer, words_of
from cudatool.sim.jit.emit import Emitter
from cudatool.sim.jit.fragments import Fragment
from cudatool.sim.jit.matrix import EVERYONE, add_product, is_dense, move_rows, observe_row, product_of, warp_arrays

__all__ = ["MatrixRun", "join_products"]

_OPCODE = "products"
_MOST_PARTS = 256
_DENSE_BYTES = 128 << 10  # on the host's stack
_CARRIES = frozenset({"addc", "subc", "madc"})  # read the condition code, which is no register
_EXACT = frozenset({"f32", "s32", "f64"})  # a result in registers is what it was in the dense matrix


@dataclass(slots=True)
class MatrixRun(Instruction):
    """Several matrix operations as one instruction.

    Its operands are the registers that they write, the registers and constants that they read, and the addresses.
    """

    parts: tuple[Instruction, ...]


# ---- finding them ----


def join_products(function: Function) -> Function:
    """Return `function` with a :class:`MatrixRun` in the place of operations that can be made together."""
    if sum(map(_joins, function.instructions)) < 2:
        return function
    code: list[Instruction] = []
    parts: list[Instruction] = []
    read: set[str] = set()
    written: set[str] = set()
    moved: dict[int, int] = {}

    def end() -> None:
        code.extend([_run(parts)] if len(parts) > 1 else parts)
        parts.clear()
        read.clear()
        written.clear()

    targets = set(function.labels.values())
    for index, instruction in enumerate(function.instructions):
        if index in targets:
            end()
            moved[index] = len(code)
        uses, sets = set(reads(instruction)), set(writes(instruction))
        if _joins(instruction):
            needed = instruction.opcode == "ldmatrix" and not written.isdisjoint(uses)
            if needed or len(parts) == _MOST_PARTS:
                end()
            parts.append(instruction)
            read |= uses
            written |= sets
            continue
        free = written.isdisjoint(uses | sets) and read.isdisjoint(sets) and uses <= function.registers.keys()
        if not (free and _is_pure(instruction)):
            end()
        code.append(instruction)
    end()
    moved[len(function.instructions)] = len(code)
    return replace(function, instructions=code, labels={name: moved[at] for name, at in function.labels.items()})


def _joins(i: Instruction) -> bool:
    if i.guard is not None:
        return False
    if i.opcode == "ldmatrix":
        return "m8n8" in i.modifiers
    return i.opcode in ("mma", "wmma") and ("sync" in i.modifiers) and _multiplies(i) and is_dense(i)


def _multiplies(i: Instruction) -> bool:
    return i.opcode == "mma" or "mma" in i.modifiers


def _is_pure(i: Instruction) -> bool:
    return opcode_of(i.opcode).is_pure and i.guard is None and "cc" not in i.modifiers and i.opcode not in _CARRIES


def _run(parts: list[Instruction]) -> MatrixRun:
    first = parts[0]
    sources: list[Operand] = []
    written: dict[str, Register] = {}
    for part in parts:
        sources += [
            source for source in _sources(part) if not (isinstance(source, Register) and source.name in written)
        ]
        written |= {one.name: one for one in elements(part.operands[0]) if isinstance(one, Register)}
    addresses = dict.fromkeys(one for one in sources if isinstance(one, Address))
    values = dict.fromkeys(one for one in sources if not isinstance(one, Address))
    operands: tuple[Operand, ...] = (VectorOperand(tuple(written.values())), VectorOperand(tuple(values)), *addresses)
    return MatrixRun(_OPCODE, ("sync", "aligned"), operands, None, first.line, first.location, tuple(parts))


def _sources(part: Instruction) -> list[Operand]:
    """Return what an operation reads: registers and constants, or an address."""
    if part.opcode == "ldmatrix":
        return [part.operands[1]]
    return [one for operand in part.operands[1:4] for one in elements(operand)]


# ---- where registers lie ----


def _parts(run: Instruction) -> tuple[Instruction, ...]:
    assert isinstance(run, MatrixRun)
    return run.parts


def _types(part: Instruction) -> list[tuple[Operand, str]]:
    """Return the operands of an operation, the result last, with what they hold; an address holds ``"b64"``."""
    if part.opcode == "ldmatrix":
        return [(part.operands[1], "b64"), *((one, "b32") for one in elements(part.operands[0]))]
    found: list[tuple[Operand, str]] = []
    types = product_of(part).types
    for operand, element in zip((*part.operands[1:4], part.operands[0]), types, strict=True):
        found += [(one, "b64" if element == "f64" else "b32") for one in elements(operand)]
    return found


def _kinds(run: Instruction) -> dict[Operand, str]:
    return {operand: kind for part in _parts(run) for operand, kind in _types(part)}


def _places(run: Instruction) -> dict[Operand, int]:
    """Return the number of the first array of each operand."""
    words = [2 if kind == "b64" else 1 for kind in _kinds(run).values()]
    return dict(zip(_kinds(run), accumulate(words, initial=0), strict=False))


def _extra(run: Instruction) -> int:
    return sum(2 if kind == "b64" else 1 for kind in _kinds(run).values())


def _leave(run: Instruction) -> list[tuple[str, Operand, str]]:
    places, kinds = _places(run), _kinds(run)
    operands = (one for operand in run.operands[1:] for one in elements(operand))
    return [EVERYONE, *((f"x{places[operand]}", operand, kinds[operand]) for operand in operands)]


def _part_of(run: Instruction, address: Operand) -> Instruction:
    """Return the first of the operations that read at `address`."""
    return next(part for part in _parts(run) if address in part.operands)


def _take(e: Emitter, run: Instruction) -> None:
    places, kinds = _places(run), _kinds(run)
    for register in elements(run.operands[0]):
        at = places[register]
        if kinds[register] == "b64":
            e.set(register, e.pack([read_array(e, f"x{at + n}") for n in (0, 1)], "i32"), "b64")
        else:
            e.set(register, read_array(e, f"x{at}"), "b32")


# ---- multiplying ----


@dataclass(slots=True)
class _Dense:
    """A matrix of the warp in the host's memory; `is_new` if the registers do not hold it yet."""

    element: str
    fragment: Fragment
    registers: tuple[Operand, ...]
    pointer: str
    is_new: bool = False

    @property
    def key(self) -> tuple[str, str, tuple[Operand, ...]]:
        return self.element, self.fragment.name, self.registers

    @property
    def buffer(self) -> tuple[str, int]:
        """What it is kept in: the type of its elements, and how many."""
        return DENSE[self.element], self.fragment.rows * self.fragment.columns * self.fragment.blocks


class _Matrices:
    """The dense matrices that are known while a run is made."""

    def __init__(self, e: Emitter, places: dict[Operand, int]) -> None:
        self._e, self._places = e, places
        self._known: dict[tuple[str, str, tuple[Operand, ...]], _Dense] = {}
        self._free: dict[tuple[str, int], list[str]] = {}
        self._bytes = 0

    def get(self, element: str, fragment: Fragment, registers: tuple[Operand, ...]) -> _Dense:
        """Return the matrix that `registers` hold."""
        wanted = _Dense(element, fragment, registers, "")
        known = self._known.get(wanted.key)
        if known is not None:
            return known
        self._write(one for one in self._known.values() if not _apart(one.registers, registers))
        free = self._free.get(wanted.buffer)
        wanted.pointer = free.pop() if free else self._new(*wanted.buffer)
        self._move(wanted, store=False)
        self._known[wanted.key] = wanted
        return wanted

    def own(self, matrix: _Dense, result: tuple[Operand, ...]) -> None:
        """Let the caller change `matrix` into what it will put into the registers `result`."""
        if not set(matrix.registers) <= set(result):
            self._write([matrix])
        del self._known[matrix.key]

    def put(self, matrix: _Dense) -> None:
        """Let registers hold `matrix`, which the caller owns; what they held before is lost."""
        self.lose(matrix.registers)
        if matrix.element in _EXACT and len(set(matrix.registers)) == len(matrix.registers):
            matrix.is_new = True
            self._known[matrix.key] = matrix
        else:
            self._move(matrix, store=True)
            self._free.setdefault(matrix.buffer, []).append(matrix.pointer)

    def lose(self, registers: tuple[Operand, ...]) -> None:
        """Forget what `registers` held: they are about to be written."""
        for matrix in [one for one in self._known.values() if not _apart(one.registers, registers)]:
            if matrix.is_new and not set(matrix.registers) <= set(registers):
                self._write([matrix])
            del self._known[matrix.key]
            self._free.setdefault(matrix.buffer, []).append(matrix.pointer)

    def finish(self) -> None:
        """Let the registers hold what they should."""
        self._write(self._known.values())

    def make_room(self) -> None:
        """Forget all matrices if they take much memory."""
        if self._bytes > _DENSE_BYTES:
            self.finish()
            for one in self._known.values():
                self._free.setdefault(one.buffer, []).append(one.pointer)
            self._known.clear()

    def _write(self, matrices: Iterable[_Dense]) -> None:
        for matrix in matrices:
            if matrix.is_new:
                self._move(matrix, store=True)
                matrix.is_new = False

    def _new(self, kind: str, count: int) -> str:
        self._bytes += count * (8 if kind == "double" else 4)
        return self._e.op(f"alloca [{count} x {kind}], align 64")

    def _move(self, matrix: _Dense, *, store: bool) -> None:
        places = [self._places[one] for one in matrix.registers]
        arrays = [place + word for word in range(words_of(matrix.element)) for place in places]
        transfer(self._e, matrix.element, matrix.pointer, arrays, matrix.fragment, store=store)


def _apart(one: Iterable[Operand], other: Iterable[Operand]) -> bool:
    return set(one).isdisjoint(other)


def _combine(e: Emitter, run: Instruction) -> None:
    places = _places(run)
    matrices = _Matrices(e, places)
    for part in _parts(run):
        if part.opcode == "ldmatrix":
            _load(e, part, places, matrices)
        else:
            _product(e, part, matrices)
    matrices.finish()


def _load(e: Emitter, part: Instruction, places: dict[Operand, int], matrices: _Matrices) -> None:
    registers = elements(part.operands[0])
    matrices.lose(registers)
    addresses = warp_arrays(e, f"x{places[part.operands[1]]}")
    move_rows(e, part, [warp_arrays(e, f"x{places[one]}") for one in registers], addresses, store=False)


def _product(e: Emitter, part: Instruction, matrices: _Matrices) -> None:
    matrices.make_room()
    product = product_of(part)
    vectors = [elements(operand) for operand in (*part.operands[1:4], part.operands[0])]
    a, b, c = (matrices.get(*one) for one in zip(product.types[:3], product.fragments[:3], vectors[:3], strict=True))
    matrices.own(c, vectors[3])
    add_product(e, part, product, a.pointer, b.pointer, c.pointer)
    matrices.put(_Dense(product.types[3], product.fragments[3], vectors[3], c.pointer))


SUSPENSIONS.append((_OPCODE, "", Suspension(Kind.WARP, _leave, _combine, _take, _extra, observe_row, part=_part_of)))
