"""Matrix operations of a warp: ``mma``, ``wmma``, ``ldmatrix``, ``stmatrix``, ``movmatrix``.

For a multiplication each thread leaves its registers; one function gathers the three matrices of the warp into dense
arrays, multiplies, and hands each lane its part of the result. Which element is whose is in tables made from
:mod:`.fragments`. Floating-point sums are made in single precision, one product after the other; PTX leaves their
order and intermediate rounding open. Semantics: PTX ISA, 9.7.14 and 9.7.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudatool.ptx import Immediate, Instruction, Operand, elements, space_of
from cudatool.sim.jit.collective import ROW, SUSPENSIONS, Kind, Suspension, array_offset, read_array
from cudatool.sim.jit.dense import DENSE, joined, multiply, transfer, words_of
from cudatool.sim.jit.emit import READ, WRITE, Emitter
from cudatool.sim.jit.fragments import ELEMENT_BITS, Fragment, fragment, quad_pair_fragment

__all__ = [
    "EVERYONE",
    "Product",
    "add_product",
    "is_dense",
    "matrices_of",
    "move_rows",
    "observe_row",
    "product_of",
    "warp_arrays",
]

EVERYONE: tuple[str, Operand, str] = ("mask", Immediate(0xFFFFFFFF), "b32")


def _shape(i: Instruction) -> tuple[int, int, int]:
    """Return m, n and k."""
    text = next(m for m in i.modifiers if m[0] == "m" and m[1:2].isdigit())
    m, _, rest = text[1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k or 0)


# ---- multiplying ----


@dataclass(frozen=True, slots=True)
class Product:
    """What a multiplication multiplies: a key of :data:`ELEMENT_BITS` and a fragment for each of A, B, C and D."""

    types: tuple[str, str, str, str]
    fragments: tuple[Fragment, Fragment, Fragment, Fragment]

    @property
    def words(self) -> list[int]:
        """How many 32-bit words of each a thread holds."""
        return [f.registers * words_of(t) for t, f in zip(self.types, self.fragments, strict=True)]


def product_of(i: Instruction) -> Product:
    m, n, k = _shape(i)
    types = [modifier for modifier in i.modifiers if modifier in ELEMENT_BITS]
    if len(types) == 2:  # wmma with f16 names the types of D and C only
        types = [types[0], "f16", "f16", types[1]]
    d, a, b, c = types
    counts = [len(elements(operand)) for operand in i.operands[:4]]
    if (m, n, k) == (8, 8, 4) and a == "f16" and i.opcode == "mma":
        layouts = [modifier for modifier in i.modifiers if modifier in ("row", "col")]
        parts = [
            quad_pair_fragment(which, t, layout)
            for which, t, layout in (("a", a, layouts[0]), ("b", b, layouts[1]), ("c", c, ""), ("c", d, ""))
        ]
    else:
        order = (("a", a, counts[1]), ("b", b, counts[2]), ("c", c, counts[3]), ("c", d, counts[0]))
        parts = [fragment(which, m, n, k, t, count) for which, t, count in order]
        if a == "b1":  # a word of 32 bits is one element of the dense matrices
            whole = [fragment(which, m, n, k // 32, "tf32", count) for which, _, count in order[:2]]
            parts = [*whole, *parts[2:]]
    return Product((a, b, c, d), (parts[0], parts[1], parts[2], parts[3]))


def warp_arrays(e: Emitter, first: str) -> str:
    """Return a pointer to this warp's part of an array, which the others follow."""
    pointer = e.op(f"getelementptr i8, ptr %slots, i64 {array_offset(first)}")
    return e.op(f"getelementptr i8, ptr {pointer}, i64 {e.op('shl i64 %warp, 7')}")


def _arrays(first: int, count: int, element: str) -> list[int]:
    """Return the numbers of the arrays of `count` registers that follow each other, as `transfer` has them."""
    words = words_of(element)
    return [first + words * n + word for word in range(words) for n in range(count)]


def add_product(e: Emitter, i: Instruction, product: Product, a: str, b: str, c: str) -> None:
    """Add the product of the dense matrices `a` and `b` to `c`."""
    parts = product.fragments[:3]
    kinds = [DENSE[element] for element in product.types[:3]]
    name = multiply(e, i, kinds[2], parts[2].rows, parts[2].columns, parts[0].columns)
    for block in range(parts[0].blocks):
        starts = [
            e.op(f"getelementptr {kind}, ptr {dense}, i64 {block * part.rows * part.columns}")
            for kind, dense, part in zip(kinds, (a, b, c), parts, strict=True)
        ]
        e.emit(f"call void @{name}({', '.join(f'ptr {start}' for start in starts)})")


def _combine_product(e: Emitter, i: Instruction) -> None:
    product = product_of(i)
    dense: list[str] = []
    first = 0
    for t, part, words in zip(product.types[:3], product.fragments[:3], product.words[:3], strict=True):
        size = part.rows * part.columns * part.blocks
        dense.append(e.op(f"alloca [{size} x {DENSE[t]}], align 64"))
        transfer(e, t, dense[-1], _arrays(first, part.registers, t), part, store=False)
        first += words
    a, b, c = dense
    add_product(e, i, product, a, b, c)
    result, d = product.types[3], product.fragments[3]
    transfer(e, result, c, _arrays(0, d.registers, result), d, store=True)


def _leave_registers(operands: list[tuple[Operand, str]]) -> list[tuple[str, Operand, str]]:
    """Leave the registers of several vectors one after the other in the extra arrays."""
    found: list[tuple[str, Operand, str]] = []
    place = 0
    for operand, element in operands:
        for register in elements(operand):
            found.append((f"x{place}", register, "b64" if element == "f64" else "b32"))
            place += words_of(element)
    return found


def _leave_product(i: Instruction) -> list[tuple[str, Operand, str]]:
    types = product_of(i).types[:3]
    return [EVERYONE, *_leave_registers(list(zip(i.operands[1:4], types, strict=True)))]


def _extra_for_product(i: Instruction) -> int:
    *sources, result = product_of(i).words
    return max(sum(sources), result)


def _take_registers(e: Emitter, i: Instruction, element: str) -> None:
    """Read back a vector of results."""
    for index, register in enumerate(elements(i.operands[0])):
        if element == "f64":
            e.set(register, e.pack([read_array(e, f"x{2 * index + n}") for n in (0, 1)], "i32"), "b64")
        else:
            e.set(register, read_array(e, f"x{index}"), "b32")


def _take_product(e: Emitter, i: Instruction) -> None:
    _take_registers(e, i, product_of(i).types[3])


# ---- wmma.load and wmma.store: each thread accesses its own elements, after all threads have come ----


def _memory_fragment(i: Instruction, operand: Operand) -> tuple[str, Fragment]:
    which = next(modifier for modifier in i.modifiers if modifier in ("a", "b", "c", "d"))
    element = [modifier for modifier in i.modifiers if modifier in ELEMENT_BITS][-1]
    m, n, k = _shape(i)
    return element, fragment(which if which != "d" else "c", m, n, k, element, len(elements(operand)))


def _leave_matrix_address(i: Instruction) -> list[tuple[str, Operand, str]]:
    """Leave the address, the stride if there is one, and what is to be stored."""
    loads = i.modifiers[0] == "load"
    vector, address = i.operands[:2] if loads else (i.operands[1], i.operands[0])
    element, part = _memory_fragment(i, vector)
    default = part.columns if "row" in i.modifiers else part.rows
    stride: Operand = i.operands[2] if len(i.operands) > 2 else Immediate(default)
    left: list[tuple[str, Operand, str]] = [EVERYONE, ("a", address, "b64"), ("c", stride, "b32")]
    return left if loads else [*left, *_leave_registers([(vector, element)])]


def _extra_for_store(i: Instruction) -> int:
    element, part = _memory_fragment(i, i.operands[1])
    return part.registers * words_of(element)


def _access_matrix(e: Emitter, i: Instruction) -> None:
    loads = i.modifiers[0] == "load"
    element, part = _memory_fragment(i, i.operands[0 if loads else 1])
    base = e.op(f"inttoptr i64 {e.pack([read_array(e, 'a'), read_array(e, 'b')], 'i32')} to ptr")
    stride = e.op(f"zext i32 {read_array(e, 'c')} to i64")
    lane = e.op("and i64 %slot, 31")
    rows = "row" in i.modifiers
    bits, per = ELEMENT_BITS[element], part.per_register
    # Where a lane's elements lie is the sum of what the lane says and what the element says.
    for register in range(part.registers):
        parts = [part.place(0, register, index) for index in range(per)]
        lines = [(row, column) if rows else (column, row) for row, column in parts]
        together = all(line == (lines[0][0], lines[0][1] + n) for n, line in enumerate(lines))
        size = max(32, bits) if together else bits
        values = []
        for index, (line, offset) in enumerate(lines[:1] if together else lines):
            pointer = _element_pointer(e, part, lane, base, stride, bits, rows, register, index, line, offset)
            space = space_of(i)
            pointer = e.guarded(space, pointer, size // 8, READ if loads else WRITE, i)
            if loads:
                values.append(e.op(f"load i{size}, ptr {pointer}, align {min(size // 8, 4)}"))
                continue
            value = _stored_register(e, element, register)
            if not together:
                value = e.convert(e.op(f"lshr i32 {value}, {bits * index}"), "i32", f"i{bits}")
            e.emit(f"store i{size} {value}, ptr {pointer}, align {min(size // 8, 4)}")
        if loads:
            target = elements(i.operands[0])[register]
            e.set(target, values[0] if together else e.pack(values, f"i{bits}"), "b64" if size == 64 else "b32")


def _stored_register(e: Emitter, element: str, register: int) -> str:
    if element == "f64":
        return e.pack([read_array(e, f"x{2 * register + n}") for n in (0, 1)], "i32")
    return read_array(e, f"x{register}")


def _element_pointer(
    e: Emitter,
    part: Fragment,
    lane: str,
    base: str,
    stride: str,
    bits: int,
    rows: bool,
    register: int,
    index: int,
    line: int,
    offset: int,
) -> str:
    """Return a native pointer to one element. `line` and `offset` are where lane 0 has it."""
    group, member = e.op(f"lshr i64 {lane}, 2"), e.op(f"and i64 {lane}, 3")
    line_value, offset_value = str(line), str(offset)
    for value, probe in ((group, 4), (member, 1)):  # how a step of either moves the element
        row, column = part.place(probe, register, index)
        there = (row, column) if rows else (column, row)
        if there[0] != line:
            line_value = e.op(f"add i64 {line_value}, {e.op(f'mul i64 {value}, {there[0] - line}')}")
        if there[1] != offset:
            offset_value = e.op(f"add i64 {offset_value}, {e.op(f'mul i64 {value}, {there[1] - offset}')}")
    place = e.op(f"add i64 {e.op(f'mul i64 {line_value}, {stride}')}, {offset_value}")
    scaled = e.op(f"mul i64 {place}, {bits}")
    return e.op(f"getelementptr i8, ptr {base}, i64 {e.op(f'lshr i64 {scaled}, 3')}")


# ---- ldmatrix, stmatrix, movmatrix: 8 x 8 matrices of 16-bit elements; a lane holds two neighbours of a row ----


def matrices_of(i: Instruction) -> int:
    return next(int(m[1]) for m in i.modifiers if m in ("x1", "x2", "x4"))


def observe_row(e: Emitter, i: Instruction, space: str, pointer: str) -> str:
    """Let checkers see the row of 16 bytes whose address this thread gives, if it is one of those that do."""
    if not e.instrument:
        return pointer
    inside = e.op(f"icmp ult i32 {e.op('and i32 %t, 31')}, {8 * matrices_of(i)}")
    before, look, seen, after = (e.new_label() for _ in range(4))
    e.emit(f"br label %{before}")
    e.label(before)
    e.emit(f"br i1 {inside}, label %{look}, label %{after}")
    e.label(look)
    checked = e.guarded(space, pointer, 16, READ if i.opcode == "ldmatrix" else WRITE, i)
    e.emit(f"br label %{seen}")
    e.label(seen)
    e.emit(f"br label %{after}")
    e.label(after)
    return e.op(f"phi ptr [ {pointer}, %{before} ], [ {checked}, %{seen} ]")


def move_rows(e: Emitter, i: Instruction, registers: Sequence[str], addresses: str, *, store: bool) -> None:
    """Move the words, or with ``.trans`` the halves of them, between memory and the arrays of the warp.

    Each register is a matrix whose rows of 16 bytes lie at the addresses that eight of the lanes have left. Those are
    at `addresses`, their upper halves in the array after it.
    """
    transposed = "trans" in i.modifiers
    name = f"{'stmatrix' if store else 'ldmatrix'}{'_trans' if transposed else ''}"
    body = e.nested()
    order = ", ".join(f"i32 {8 * (half % 8) + half // 8}" for half in range(64))
    transposition = f"<64 x i16> poison, <64 x i32> <{order}>"
    pointers = []
    for row in range(8):
        words = [body.op(f"getelementptr i32, ptr %table, i64 {row + upper}") for upper in (0, ROW)]
        low, high = (body.op(f"load i32, ptr {word}") for word in words)
        pointers.append(body.op(f"inttoptr i64 {body.pack([low, high], 'i32')} to ptr"))
    if store:
        halves = body.op("load <64 x i16>, ptr %register, align 4")
        if transposed:
            halves = body.op(f"shufflevector <64 x i16> {halves}, {transposition}")
        for row, pointer in enumerate(pointers):
            places = ", ".join(f"i32 {8 * row + half}" for half in range(8))
            part = body.op(f"shufflevector <64 x i16> {halves}, <64 x i16> poison, <8 x i32> <{places}>")
            body.emit(f"store <8 x i16> {part}, ptr {pointer}, align 2")
    else:
        parts = [body.op(f"load <8 x i16>, ptr {pointer}, align 2") for pointer in pointers]
        halves = joined(body, "i16", 8, parts)
        if transposed:
            halves = body.op(f"shufflevector <64 x i16> {halves}, {transposition}")
        body.emit(f"store <64 x i16> {halves}, ptr %register, align 4")
    lines = "\n".join(body.lines)
    e.define(f"\ndefine internal void @{name}(ptr %register, ptr %table) noinline {{\n{lines}\n  ret void\n}}")
    for number, register in enumerate(registers):
        table = e.op(f"getelementptr i32, ptr {addresses}, i64 {8 * number}")
        e.emit(f"call void @{name}(ptr {register}, ptr {table})")


def _move_own(e: Emitter, i: Instruction, *, store: bool) -> None:
    """Do one instruction alone."""
    registers = [warp_arrays(e, f"x{n}") for n in range(matrices_of(i))]
    move_rows(e, i, registers, warp_arrays(e, "a"), store=store)


def _transpose(e: Emitter, i: Instruction) -> None:
    """``movmatrix``: lane 4 r + c gets elements (2 c, r) and (2 c + 1, r)."""
    vector = "<32 x i32>"
    source = e.op(f"load {vector}, ptr {warp_arrays(e, 'x0')}, align 4")
    parts = []
    for half in (0, 1):
        lanes = [4 * (2 * (lane % 4) + half) + lane // 8 for lane in range(32)]
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        taken = e.op(f"shufflevector {vector} {source}, {vector} poison, <32 x i32> <{mask}>")
        shifts = ", ".join(f"i32 {16 * (lane // 4 % 2)}" for lane in range(32))
        taken = e.op(f"lshr {vector} {taken}, <{shifts}>")
        parts.append(e.op(f"and {vector} {taken}, splat (i32 65535)"))
    upper = e.op(f"shl {vector} {parts[1]}, splat (i32 16)")
    e.emit(f"store {vector} {e.op(f'or {vector} {parts[0]}, {upper}')}, ptr {warp_arrays(e, 'x0')}, align 4")


def _nothing(e: Emitter, i: Instruction) -> None:
    pass


def is_dense(i: Instruction) -> bool:
    """Whether a multiplication is neither sparse nor scaled by blocks."""
    types = [modifier for modifier in i.modifiers if modifier in ELEMENT_BITS]
    return len(types) in (2, 4) and not any(m.startswith(("sp", "kind::", "block_scale")) for m in i.modifiers)


_MULTIPLY = Suspension(Kind.WARP, _leave_product, _combine_product, _take_product, _extra_for_product, fits=is_dense)

SUSPENSIONS += [
    ("mma", "sync", _MULTIPLY),
    ("wmma", "mma", _MULTIPLY),
    ("wmma", "load", Suspension(Kind.WARP, _leave_matrix_address, _nothing, _access_matrix)),
    ("wmma", "store", Suspension(Kind.WARP, _leave_matrix_address, _nothing, _access_matrix, _extra_for_store)),
    (
        "ldmatrix",
        "m8n8",
        Suspension(
            Kind.WARP,
            lambda i: [EVERYONE, ("a", i.operands[1], "b64")],
            lambda e, i: _move_own(e, i, store=False),
            lambda e, i: _take_registers(e, i, "b16"),
            matrices_of,
            observe_row,
        ),
    ),
    (
        "stmatrix",
        "m8n8",
        Suspension(
            Kind.WARP,
            lambda i: [EVERYONE, ("a", i.operands[0], "b64"), *_leave_registers([(i.operands[1], "b16")])],
            lambda e, i: _move_own(e, i, store=True),
            _nothing,
            matrices_of,
            observe_row,
        ),
    ),
    (
        "movmatrix",
        "sync",
        Suspension(
            Kind.WARP,
            lambda i: [EVERYONE, ("x0", i.operands[1], "b32")],
            _transpose,
            lambda e, i: _take_registers(e, i, "b16"),
            lambda i: 1,
        ),
    ),
]
