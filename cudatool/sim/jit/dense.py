"""Dense matrices of a warp: from the registers of its lanes, to them, and their products.

A register of a warp is a vector of 32 words. Which element of the matrix each part of it is, a :class:`.Fragment` says;
so a matrix is the elements of some registers in another order, which is known when the kernel is translated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from cudatool.ptx import Instruction
from cudatool.sim.jit.context import array_offset
from cudatool.sim.jit.emit import Emitter
from cudatool.sim.jit.formats import widen_fp8
from cudatool.sim.jit.fragments import ELEMENT_BITS, Fragment

__all__ = ["DENSE", "joined", "multiply", "transfer", "words_of"]

# In which type a dense matrix of each element type is kept.
DENSE = {
    **dict.fromkeys(["f16", "bf16", "tf32", "f32", "e4m3", "e5m2"], "float"),
    **dict.fromkeys(["s8", "u8", "s4", "u4", "s32", "b1"], "i32"),
    "f64": "double",
}
_LONG_ENOUGH = 8  # elements beside each other, of a vector that is worth a load or store of its own
_ROWS = 8  # whose sums a processor makes at the same time: each waits four cycles for the one before


def words_of(element: str) -> int:
    """Return the 32-bit words of a register that holds elements of a type."""
    return 2 if element == "f64" else 1


# ---- vectors ----


def _permuted(e: Emitter, kind: str, count: int, vector: str, order: Sequence[int]) -> str:
    """Return a vector of the elements of another one, of `count`, whose places are `order`."""
    if list(order) == list(range(count)):
        return vector
    mask = ", ".join(f"i32 {place}" for place in order)
    source = f"<{count} x {kind}>"
    return e.op(f"shufflevector {source} {vector}, {source} poison, <{len(order)} x i32> <{mask}>")


def joined(e: Emitter, kind: str, count: int, vectors: Sequence[str]) -> str:
    """Return one vector of several that have `count` elements each; how many they are is a power of two."""
    found = list(vectors)
    while len(found) > 1:
        mask = ", ".join(f"i32 {place}" for place in range(2 * count))
        source = f"<{count} x {kind}>"
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [e.op(f"shufflevector {source} {a}, {source} {b}, <{2 * count} x i32> <{mask}>") for a, b in pairs]
        count *= 2
    return found[0]


# ---- registers to elements and back ----


def _elements(e: Emitter, element: str, words: str, count: int, order: Sequence[int]) -> str:
    """Return elements of `count` registers' words as a vector of the dense type, those at the places `order`."""
    bits, many = ELEMENT_BITS[element], len(order)
    if bits == 64:
        return _permuted(e, "double", count, e.op(f"bitcast <{2 * count} x i32> {words} to <{count} x double>"), order)
    if bits >= 32 or element == "b1":
        if element == "tf32":  # the lower bits do not count
            words = e.op(f"and <{count} x i32> {words}, splat (i32 -8192)")
        found = _permuted(e, "i32", count, words, order)
        return found if DENSE[element] == "i32" else e.op(f"bitcast <{many} x i32> {found} to <{many} x float>")
    if bits == 4:
        return _nibbles(e, element, words, count, order)
    per = 32 // bits
    parts = e.op(f"bitcast <{count} x i32> {words} to <{count * per} x i{bits}>")
    parts = _permuted(e, f"i{bits}", count * per, parts, order)
    if element in ("s8", "u8"):
        return e.op(f"{'sext' if element == 's8' else 'zext'} <{many} x i8> {parts} to <{many} x i32>")
    if element == "bf16":
        wide = e.op(f"zext <{many} x i16> {parts} to <{many} x i32>")
        return e.op(f"bitcast <{many} x i32> {e.op(f'shl <{many} x i32> {wide}, splat (i32 16)')} to <{many} x float>")
    if element == "f16":
        halves = e.op(f"bitcast <{many} x i16> {parts} to <{many} x half>")
    else:
        halves = widen_fp8(e, parts, element, many)
    return e.op(f"fpext <{many} x half> {halves} to <{many} x float>")


def _nibbles(e: Emitter, element: str, words: str, count: int, order: Sequence[int]) -> str:
    many = 4 * count
    parts = e.op(f"bitcast <{count} x i32> {words} to <{many} x i8>")
    right = "ashr" if element == "s4" else "lshr"
    lower = e.op(f"shl <{many} x i8> {parts}, splat (i8 4)")
    halves = [e.op(f"{right} <{many} x i8> {each}, splat (i8 4)") for each in (lower, parts)]
    places = [place // 2 + many * (place % 2) for place in order]
    found = _permuted(e, "i8", 2 * many, joined(e, "i8", many, halves), places)
    return e.op(f"{'sext' if element == 's4' else 'zext'} <{len(order)} x i8> {found} to <{len(order)} x i32>")


def _words(e: Emitter, element: str, vector: str, count: int) -> str:
    """Return the words of registers that hold `count` elements: f32, f64, f16 or s32."""
    kind = f"<{count} x {DENSE[element]}>"
    if element == "f16":
        halves = e.op(f"fptrunc {kind} {vector} to <{count} x half>")
        return e.op(f"bitcast <{count} x half> {halves} to <{count // 2} x i32>")
    if DENSE[element] == "i32":
        return vector
    return e.op(f"bitcast {kind} {vector} to <{count * words_of(element)} x i32>")


# ---- matrices ----


@lru_cache(64)
def _groups(which: Fragment) -> list[tuple[int, int, list[int]]]:
    """Return the registers of a fragment in groups: the first, how many, and the places of their elements.

    The elements of a group lie in long rows of the dense matrix, if those of so few registers can.
    """
    table = which.table()
    each = 32 * which.per_register
    size = 1
    while True:
        places = [table[each * first : each * (first + size)] for first in range(0, which.registers, size)]
        if size == which.registers or all(stop - start >= _LONG_ENOUGH for one in places for start, stop in _rows(one)):
            return [(size * number, size, one) for number, one in enumerate(places)]
        size = size * 2 if which.registers % (size * 2) == 0 else which.registers


def _rows(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return where elements lie beside each other: the first place, and the one after the last."""
    found = sorted(set(places))
    starts = [found[0], *(after for before, after in pairwise(found) if after != before + 1)]
    stops = [*(before + 1 for before, after in pairwise(found) if after != before + 1), found[-1] + 1]
    return list(zip(starts, stops, strict=True))


def transfer(e: Emitter, element: str, dense: str, arrays: Sequence[int], which: Fragment, *, store: bool) -> None:
    """Fill a dense matrix from the registers of a warp, or with `store` the registers from the matrix.

    Parameters
    ----------
    arrays
        The numbers of the extra arrays that registers lie in; the second word of one that has two, after those.
    """
    name = f"{'spread' if store else 'gather'}_{element}_{which.name}"
    body = e.nested()
    words = [body.op(f"getelementptr i8, ptr %own, i64 %x{n}") for n in range(len(arrays))]
    for first, count, places in _groups(which):
        registers = range(first, first + count)
        if element == "f64":
            some = [words[n] for register in registers for n in (register, register + which.registers)]
        else:
            some = [words[register] for register in registers]
        (_spread if store else _gather)(body, element, some, places)
    parameters = ", ".join(f"i64 %x{n}" for n in range(len(arrays)))
    lines = "\n".join(body.lines)
    e.define(f"\ndefine internal void @{name}(ptr %dense, ptr %own, {parameters}) noinline {{\n{lines}\n  ret void\n}}")
    own = e.op(f"getelementptr i8, ptr %slots, i64 {e.op('shl i64 %warp, 7')}")
    # Numbers, not pointers: a kernel has thousands of these calls, which LLVM has to get through.
    offsets = ", ".join(f"i64 {array_offset(f'x{n}')}" for n in arrays)
    e.emit(f"call void @{name}(ptr {dense}, ptr {own}, {offsets})")


def _gather(e: Emitter, element: str, words: Sequence[str], places: Sequence[int]) -> None:
    kind = DENSE[element]
    loaded = [e.op(f"load <32 x i32>, ptr {word}, align 4") for word in words]
    if element == "f64":
        pairs = zip(loaded[::2], loaded[1::2], strict=True)
        order = [half + 32 * word for half in range(32) for word in (0, 1)]
        loaded = [_permuted(e, "i32", 64, joined(e, "i32", 32, pair), order) for pair in pairs]
    each = 32 * words_of(element)
    whole = joined(e, "i32", each, loaded)
    source = {place: index for index, place in enumerate(places)}
    for start, stop in _rows(places):
        order = [source[place] for place in range(start, stop)]
        vector = _elements(e, element, whole, 32 * len(loaded), order)
        pointer = e.op(f"getelementptr {kind}, ptr %dense, i64 {start}")
        e.emit(f"store <{stop - start} x {kind}> {vector}, ptr {pointer}, align 4")


def _spread(e: Emitter, element: str, words: Sequence[str], places: Sequence[int]) -> None:
    kind, rows = DENSE[element], _rows(places)
    parts = []
    for start, stop in rows:
        pointer = e.op(f"getelementptr {kind}, ptr %dense, i64 {start}")
        parts.append(e.op(f"load <{stop - start} x {kind}>, ptr {pointer}, align 4"))
    whole = joined(e, kind, rows[0][1] - rows[0][0], parts)
    order = {place: index for index, place in enumerate(sorted(set(places)))}
    vector = _permuted(e, kind, len(order), whole, [order[place] for place in places])
    found = _words(e, element, vector, len(places))
    for number, word in enumerate(words):
        if element == "f64":
            lanes = [64 * (number // 2) + 2 * lane + number % 2 for lane in range(32)]
        else:
            lanes = [32 * number + lane for lane in range(32)]
        e.emit(f"store <32 x i32> {_permuted(e, 'i32', 32 * len(words), found, lanes)}, ptr {word}, align 4")


@dataclass(frozen=True, slots=True)
class _Sums:
    """How the products of elements are added up, one vector of sums for each row of the result.

    Attributes
    ----------
    kind
        Type of the elements.
    columns
        Of the result.
    operation
        ``"xor"`` or ``"and"`` if a product is the number of bits that it leaves, else empty.
    is_clamped
        Whether sums are exact, in 64 bits, and clamped to 32 in the end (``.satfinite``).
    """

    kind: str
    columns: int
    operation: str
    is_clamped: bool

    @property
    def elements(self) -> str:
        """The type of a row of elements."""
        return f"<{self.columns} x {self.kind}>"

    @property
    def sums(self) -> str:
        """The type of a row of sums."""
        return f"<{self.columns} x i64>" if self.is_clamped else self.elements

    def begin(self, e: Emitter, c: str) -> str:
        """Return the sums that a row of the third matrix, at `c`, begins with."""
        row = e.op(f"load {self.elements}, ptr {c}, align 4")
        return e.op(f"sext {self.elements} {row} to {self.sums}") if self.is_clamped else row

    def add(self, e: Emitter, a: str, b: str, total: str) -> str:
        """Return sums with one more product each."""
        vector, columns = self.elements, self.columns
        if self.kind in ("float", "double"):
            suffix = f"v{columns}{ {'float': 'f32', 'double': 'f64'}[self.kind] }"
            return e.call(vector, f"llvm.fma.{suffix}", f"{vector} {a}", f"{vector} {b}", f"{vector} {total}")
        if self.operation:
            product = e.op(f"{self.operation} {vector} {a}, {b}")
            product = e.call(vector, f"llvm.ctpop.v{columns}i32", f"{vector} {product}")
        else:
            product = e.op(f"mul {vector} {a}, {b}")
        if self.is_clamped:
            product = e.op(f"sext {vector} {product} to {self.sums}")
        return e.op(f"add {self.sums} {total}, {product}")

    def end(self, e: Emitter, total: str) -> str:
        """Return the row of elements that sums become."""
        if not self.is_clamped:
            return total
        wide, function = self.sums, f"v{self.columns}i64"
        low = e.call(wide, f"llvm.smin.{function}", f"{wide} {total}", f"{wide} splat (i64 {2**31 - 1})")
        both = e.call(wide, f"llvm.smax.{function}", f"{wide} {low}", f"{wide} splat (i64 {-(2**31)})")
        return e.op(f"trunc {wide} {both} to <{self.columns} x i32>")


# For each group of rows, for each place along the depth: `add` a product to all sums of the group.
_MULTIPLY = """
define internal void @{name}(ptr %a, ptr %b, ptr %c) noinline {{
entry:
  br label %row
row:
  %i = phi i64 [ 0, %entry ], [ %i.next, %row.end ]
  %c.first = mul i64 %i, {columns}
  %c.p = getelementptr {kind}, ptr %c, i64 %c.first
  %a.first = mul i64 %i, {depth}
{begin}
  br label %inner
inner:
  %k = phi i64 [ 0, %row ], [ %k.next, %inner ]
{carried}
  %a.place = add i64 %a.first, %k
  %b.p = getelementptr {vector}, ptr %b, i64 %k
{add}
  %k.next = add i64 %k, 1
  %k.done = icmp eq i64 %k.next, {depth}
  br i1 %k.done, label %row.end, label %inner
row.end:
{end}
  %i.next = add i64 %i, {group}
  %done = icmp eq i64 %i.next, {rows}
  br i1 %done, label %end, label %row
end:
  ret void
}}"""


def multiply(e: Emitter, i: Instruction, kind: str, rows: int, columns: int, depth: int) -> str:
    """Return the name of a function that adds the product of two dense matrices to a third.

    Each sum is made in order: of :data:`_ROWS` rows at a time, one product each.
    """
    operation = next((m for m in i.modifiers if m in ("xor", "and")), "")
    sums = _Sums(kind, columns, operation, is_clamped="satfinite" in i.modifiers and kind == "i32")
    words = ["multiply", kind, str(rows), str(columns), str(depth), operation, "clamped" if sums.is_clamped else ""]
    name = "_".join(filter(None, words))
    vector = sums.elements
    body = e.nested()
    totals = []
    b = body.op(f"load {vector}, ptr %b.p, align 4")
    for row in range(_ROWS):
        place = body.op(f"add i64 %a.place, {row * depth}")
        factor = body.op(f"load {kind}, ptr {body.op(f'getelementptr {kind}, ptr %a, i64 {place}')}")
        first = body.op(f"insertelement {vector} poison, {kind} {factor}, i32 0")
        a = body.op(f"shufflevector {vector} {first}, {vector} poison, <{columns} x i32> zeroinitializer")
        totals.append(sums.add(body, a, b, f"%sum{row}"))
    add = _cut(body)
    carried = []
    for row, total in enumerate(totals):
        start = sums.begin(body, body.op(f"getelementptr {vector}, ptr %c.p, i64 {row}"))
        carried.append(f"  %sum{row} = phi {sums.sums} [ {start}, %row ], [ {total}, %inner ]")
    begin = _cut(body)
    for row, total in enumerate(totals):
        result = sums.end(body, total)
        pointer = body.op(f"getelementptr {vector}, ptr %c.p, i64 {row}")
        body.emit(f"store {vector} {result}, ptr {pointer}, align 4")
    code = {"begin": begin, "carried": "\n".join(carried), "add": add, "end": _cut(body)}
    sizes = {"rows": rows, "columns": columns, "depth": depth, "group": _ROWS}
    e.define(_MULTIPLY.format(name=name, kind=kind, vector=vector, **sizes, **code))
    return name


def _cut(e: Emitter) -> str:
    """Return what was emitted so far; what comes next is another part of the same function."""
    text = "\n".join(e.lines)
    e.lines.clear()
    return text
