"""Matrix operations of a warp: ``mma``, ``wmma``, ``ldmatrix``, ``stmatrix``, ``movmatrix``.

For a multiplication each thread leaves its registers; one function gathers the three matrices of the warp into dense
arrays, multiplies, and hands each lane its part of the result. Which element is whose is in tables made from
:mod:`.fragments`. Floating-point sums are made in single precision, one product after the other; PTX leaves their
order and intermediate rounding open. Semantics: PTX ISA, 9.7.14 and 9.7.15.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cudatool.ptx import Immediate, Instruction, Operand, elements, space_of
from cudatool.sim.jit.collective import ROW, SUSPENSIONS, Kind, Suspension, array_offset, read_array
from cudatool.sim.jit.emit import READ, WRITE, Emitter
from cudatool.sim.jit.formats import widen_fp8
from cudatool.sim.jit.fragments import ELEMENT_BITS, Fragment, fragment, quad_pair_fragment

__all__ = [
    "DENSE",
    "EVERYONE",
    "Product",
    "is_dense",
    "matrices_of",
    "move_rows",
    "multiply",
    "observe_row",
    "product_of",
    "transfer",
    "warp_arrays",
    "words_of",
]

EVERYONE: tuple[str, Operand, str] = ("mask", Immediate(0xFFFFFFFF), "b32")
# In which type a dense matrix of each element type is kept.
DENSE = {
    **dict.fromkeys(["f16", "bf16", "tf32", "f32", "e4m3", "e5m2"], "float"),
    **dict.fromkeys(["s8", "u8", "s4", "u4", "s32", "b1"], "i32"),
    "f64": "double",
}


def words_of(element: str) -> int:
    """Return the 32-bit words of a register that holds elements of a type."""
    return 2 if element == "f64" else 1


def _shape(i: Instruction) -> tuple[int, int, int]:
    """Return m, n and k."""
    text = next(m for m in i.modifiers if m[0] == "m" and m[1:2].isdigit())
    m, _, rest = text[1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k or 0)


# ---- gathering and spreading: dense matrix <-> registers of a warp ----


def _table(e: Emitter, which: Fragment) -> str:
    e.define(_table_text(which))
    return f"@fragment_{which.name}"


@lru_cache(64)  # a kernel has thousands of the same
def _table_text(which: Fragment) -> str:
    positions = ", ".join(f"i16 {position}" for position in which.table())
    count = 32 * which.registers * which.per_register
    return f"@fragment_{which.name} = internal constant [{count} x i16] [{positions}]"


def _decode(e: Emitter, element: str, word: str, part: int) -> str:
    """Return element `part` of a register as a value of its dense type."""
    bits = ELEMENT_BITS[element]
    if bits >= 32 or element == "b1":
        if element == "tf32":  # the lower bits do not count
            word = e.op(f"and i32 {word}, -8192")
        return e.convert(word, "i32", DENSE[element]) if element != "f64" else word
    if element in ("s8", "u8", "s4", "u4"):
        raised = e.op(f"shl i32 {word}, {32 - bits * (part + 1)}")
        return e.op(f"{'ashr' if element[0] == 's' else 'lshr'} i32 {raised}, {32 - bits}")
    low = e.op(f"lshr i32 {word}, {bits * part}")
    if element == "bf16":
        return e.op(f"bitcast i32 {e.op(f'shl i32 {low}, 16')} to float")
    half = e.op(f"bitcast i16 {e.op(f'trunc i32 {low} to i16')} to half") if bits == 16 else ""
    if bits == 8:
        half = widen_fp8(e, e.op(f"trunc i32 {low} to i8"), element)
    return e.op(f"fpext half {half} to float")


def _encode(e: Emitter, element: str, values: list[str]) -> str:
    """Return dense values as one register."""
    if element == "f16":
        halves = [e.op(f"bitcast half {e.op(f'fptrunc float {value} to half')} to i16") for value in values]
        return e.pack(halves, "i16")
    return e.convert(values[0], DENSE[element], "i32") if element != "f64" else values[0]


def _loop(name: str, body: Emitter, inner: str) -> str:
    """Return a function over the registers and lanes of a fragment, around `body`."""
    lines = "\n".join(body.lines)
    return f"""
define internal void @{name}(ptr %registers, ptr %table, i64 %count, ptr %dense) noinline {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %register = lshr i64 %i, 5
  %lane = and i64 %i, 31
  %row = mul i64 %register, {inner}
  %place = add i64 %row, %lane
  %at = getelementptr i32, ptr %registers, i64 %place
{lines}
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %loop
end:
  ret void
}}"""


def transfer(
    e: Emitter,
    element: str,
    dense: str,
    arrays: str,
    which: Fragment,
    *,
    store: bool,
    first: int = 0,
    count: int | None = None,
) -> None:
    """Fill a dense matrix from the registers of a warp, or with `store` the registers from the matrix.

    Of the fragment's registers, `count` from `first` on, which are those at `arrays`.
    """
    name = f"{'spread' if store else 'gather'}_{element}"
    body, kind, per = e.nested(), DENSE[element], which.per_register
    upper = body.op(f"getelementptr i32, ptr %at, i64 {ROW}") if element == "f64" else ""
    places = []
    for part in range(per):
        entry = body.op(f"mul i64 %i, {per}")
        position = body.op(f"getelementptr i16, ptr %table, i64 {body.op(f'add i64 {entry}, {part}')}")
        wide = body.op(f"zext i16 {body.op(f'load i16, ptr {position}')} to i64")
        places.append(body.op(f"getelementptr {kind}, ptr %dense, i64 {wide}"))
    if store:
        value = _encode(body, element, [body.op(f"load {kind}, ptr {place}") for place in places])
        if element == "f64":
            pattern = body.op(f"bitcast double {value} to i64")
            body.emit(f"store i32 {body.convert(body.op(f'lshr i64 {pattern}, 32'), 'i64', 'i32')}, ptr {upper}")
            value = body.convert(pattern, "i64", "i32")
        body.emit(f"store i32 {value}, ptr %at")
    else:
        word = body.op("load i32, ptr %at")
        if element == "f64":
            both = body.pack([word, body.op(f"load i32, ptr {upper}")], "i32")
            word = body.op(f"bitcast i64 {both} to double")
        for part, place in enumerate(places):
            body.emit(f"store {kind} {_decode(body, element, word, part)}, ptr {place}")
    e.define(_loop(name, body, str(ROW * words_of(element))))
    table = _table(e, which)
    if first:
        table = e.op(f"getelementptr i16, ptr {table}, i64 {32 * per * first}")
    number = which.registers if count is None else count
    e.emit(f"call void @{name}(ptr {arrays}, ptr {table}, i64 {32 * number}, ptr {dense})")


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


def multiply(e: Emitter, i: Instruction, kind: str, rows: int, columns: int, depth: int) -> str:
    """Return the name of a function that adds the product of two dense matrices to a third."""
    vector = f"<{columns} x {kind}>"
    operation = next((m for m in i.modifiers if m in ("xor", "and")), "")
    body = e.nested()
    factor = body.op(f"load {kind}, ptr %a.p")
    first = body.op(f"insertelement {vector} poison, {kind} {factor}, i32 0")
    a = body.op(f"shufflevector {vector} {first}, {vector} poison, <{columns} x i32> zeroinitializer")
    b = body.op(f"load {vector}, ptr %b.p, align 8")
    wide = vector
    suffix = f"v{columns}{ {'float': 'f32', 'double': 'f64'}.get(kind, kind) }"
    if kind in ("float", "double"):
        total = body.call(vector, f"llvm.fma.{suffix}", f"{vector} {a}", f"{vector} {b}", f"{vector} %sum")
    else:
        if operation:
            product = body.op(f"{operation} {vector} {a}, {b}")
            product = body.call(vector, f"llvm.ctpop.{suffix}", f"{vector} {product}")
        else:
            product = body.op(f"mul {vector} {a}, {b}")
        if "satfinite" in i.modifiers:  # the exact sum is clamped
            wide = f"<{columns} x i64>"
            product = body.op(f"sext {vector} {product} to {wide}")
        total = body.op(f"add {wide} %sum, {product}")
    inner = "\n".join(body.lines)
    body.lines.clear()
    start, widen, result = "%c.row", "", total
    if wide != vector:
        start, widen = "%c.wide", f"\n  %c.wide = sext {vector} %c.row to {wide}"
        high = body.call(wide, f"llvm.smin.v{columns}i64", f"{wide} {total}", f"{wide} splat (i64 {2**31 - 1})")
        low = body.call(wide, f"llvm.smax.v{columns}i64", f"{wide} {high}", f"{wide} splat (i64 {-(2**31)})")
        result = body.op(f"trunc {wide} {low} to {vector}")
    body.emit(f"store {vector} {result}, ptr %c.p, align 8")
    finish = "\n".join(body.lines)
    name = "_".join(filter(None, ["multiply", kind, str(rows), str(columns), str(depth), operation]))
    name += "_clamped" if wide != vector else ""
    e.define(f"""
define internal void @{name}(ptr %a, ptr %b, ptr %c) noinline {{
entry:
  br label %row
row:
  %i = phi i64 [ 0, %entry ], [ %i.next, %row.end ]
  %first = mul i64 %i, {columns}
  %c.p = getelementptr {kind}, ptr %c, i64 %first
  %c.row = load {vector}, ptr %c.p, align 8{widen}
  br label %inner
inner:
  %k = phi i64 [ 0, %row ], [ %k.next, %inner ]
  %sum = phi {wide} [ {start}, %row ], [ {total}, %inner ]
  %a.row = mul i64 %i, {depth}
  %a.place = add i64 %a.row, %k
  %a.p = getelementptr {kind}, ptr %a, i64 %a.place
  %b.place = mul i64 %k, {columns}
  %b.p = getelementptr {kind}, ptr %b, i64 %b.place
{inner}
  %k.next = add i64 %k, 1
  %k.done = icmp eq i64 %k.next, {depth}
  br i1 %k.done, label %row.end, label %inner
row.end:
{finish}
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, {rows}
  br i1 %done, label %end, label %row
end:
  ret void
}}""")
    return name


def warp_arrays(e: Emitter, first: str) -> str:
    """Return a pointer to this warp's part of an array, which the others follow."""
    pointer = e.op(f"getelementptr i8, ptr %slots, i64 {array_offset(first)}")
    return e.op(f"getelementptr i8, ptr {pointer}, i64 {e.op('shl i64 %warp, 7')}")


def _combine_product(e: Emitter, i: Instruction) -> None:
    product = product_of(i)
    dense: list[str] = []
    first = 0
    a, b, c, d = product.fragments
    for t, part, words in zip(product.types[:3], (a, b, c), product.words[:3], strict=True):
        size = part.rows * part.columns * part.blocks
        dense.append(e.op(f"alloca [{size} x {DENSE[t]}], align 64"))
        transfer(e, t, dense[-1], warp_arrays(e, f"x{first}"), part, store=False)
        first += words
    kind = DENSE[product.types[2]]
    name = multiply(e, i, kind, c.rows, c.columns, a.columns)
    for block in range(a.blocks):
        starts = [
            e.op(f"getelementptr {kind}, ptr {dense[n]}, i64 {block * part.rows * part.columns}")
            for n, part in enumerate((a, b, c))
        ]
        e.emit(f"call void @{name}({', '.join(f'ptr {start}' for start in starts)})")
    transfer(e, product.types[3], dense[2], warp_arrays(e, "x0"), d, store=True)


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


def move_rows(
    e: Emitter, i: Instruction, registers: str, addresses: str, *, store: bool, first: int = 0, count: int | None = None
) -> None:
    """Move the words, or with ``.trans`` the halves of them, between memory and the arrays of the warp.

    Of the instruction's registers, `count` from `first` on, which are those at `registers`. The lanes' addresses are at
    `addresses`, their upper halves in the array after it.
    """
    trans = "trans" in i.modifiers
    name = f"{'stmatrix' if store else 'ldmatrix'}{'_trans' if trans else ''}"
    body = e.nested()
    quad, member = body.op("lshr i64 %lane, 2"), body.op("and i64 %lane, 3")
    kind, accesses = ("i16", 2) if trans else ("i32", 1)
    values = []
    word = body.op("load i32, ptr %at") if store else ""
    for half in range(accesses):
        row = body.op(f"add i64 {body.op(f'shl i64 {member}, 1')}, {half}") if trans else quad
        offset = body.op(f"shl i64 {quad}, 1" if trans else f"shl i64 {member}, 2")
        source = body.op(f"add i64 {body.op('shl i64 %register, 3')}, {row}")
        low = body.op(f"load i32, ptr {body.op(f'getelementptr i32, ptr %table, i64 {source}')}")
        beyond = body.op(f"add i64 {source}, {ROW}")
        high = body.op(f"load i32, ptr {body.op(f'getelementptr i32, ptr %table, i64 {beyond}')}")
        pointer = body.op(f"inttoptr i64 {body.pack([low, high], 'i32')} to ptr")
        pointer = body.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")
        if store:
            part = body.convert(body.op(f"lshr i32 {word}, {16 * half}"), "i32", kind)
            body.emit(f"store {kind} {part}, ptr {pointer}")
        else:
            values.append(body.op(f"load {kind}, ptr {pointer}"))
    if not store:
        body.emit(f"store i32 {body.pack(values, kind) if trans else values[0]}, ptr %at")
    e.define(_loop(name, body, str(ROW)))
    if first:
        addresses = e.op(f"getelementptr i32, ptr {addresses}, i64 {8 * first}")
    number = matrices_of(i) if count is None else count
    e.emit(f"call void @{name}(ptr {registers}, ptr {addresses}, i64 {32 * number}, ptr null)")


def _move_own(e: Emitter, i: Instruction, *, store: bool) -> None:
    """Do one instruction alone."""
    move_rows(e, i, warp_arrays(e, "x0"), warp_arrays(e, "a"), store=store)


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
