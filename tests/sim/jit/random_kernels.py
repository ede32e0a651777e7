"""Random PTX kernels, run on one device and compared with another.

    python tests/sim/jit/random_kernels.py --seeds 0:500 --out RESULTS.npz
    python tests/sim/jit/random_kernels.py --compare RESULTS.npz OTHER.npz

A seed gives one kernel. Even seeds give *programs*: straight code, branches, loops, shared and local memory, warp
collectives and atomics over integers, floats and doubles, with every result bit defined by PTX. Odd seeds apply one
*instruction form* to many operands, the first time to values of all kinds, then to edge values alone; the ``.approx``
forms have a bound in units in the last place. NaNs count as equal, as PTX does not define their payloads.

The device is the one that ``CUDATOOL_DEVICE`` names. Exit status of ``--compare``: 1 if results differ.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 256
WORDS = 16  # 32-bit words of input for each thread, and of output
BATCH = 50  # kernels in a module

SIZES = {"u16": 2, "s16": 2, "b16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "f16x2": 4}
SIZES |= {"bf16x2": 4, "u64": 8, "s64": 8, "b64": 8, "f64": 8, "pred": 0}
REGISTERS = {2: ("b16", "h"), 4: ("b32", "r"), 8: ("b64", "q"), 0: ("pred", "p")}


@dataclass(frozen=True)
class Form:
    """An instruction: its name with modifiers, the types of its destination and sources, and the bound on its error."""

    name: str
    result: str
    sources: tuple[str, ...]
    ulp: float = 0.0
    literals: tuple[str, ...] = ()  # operands after the sources


def _holds(integer: str, other: str) -> bool:
    """Return whether a type has all values of another; then there is nothing to saturate."""
    bits, others = int(integer[1:]), int(other[1:])
    return bits >= others if integer[0] == other[0] else integer[0] == "s" and bits > others


def _forms() -> list[Form]:
    found: list[Form] = []

    def add(name: str, result: str, *sources: str, ulp: float = 0.0, literals: tuple[str, ...] = ()) -> None:
        found.append(Form(name, result, sources, ulp, literals))

    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            add(f"{name}.{t}", t, t, t)
        add(f"mad.lo.{t}", t, t, t, t)
        bits = t.replace("u", "b").replace("s", "b")
        add(f"shr.{t}", t, t, "u32")
        add(f"shl.{bits}", bits, bits, "u32")
        for name in ("and", "or", "xor"):
            add(f"{name}.{bits}", bits, bits, bits)
        add(f"not.{bits}", bits, bits)
        if t[0] == "s":
            add(f"abs.{t}", t, t)
            add(f"neg.{t}", t, t)
        for relation in ("eq", "ne", "lt", "le", "gt", "ge"):
            add(f"setp.{relation}.{t}", "pred", t, t)
        for other in ("u16", "s16", "u32", "s32", "u64", "s64"):
            if other != t:
                add(f"cvt.{other}.{t}", other, t)
                if not _holds(other, t):
                    add(f"cvt.sat.{other}.{t}", other, t)
        for f, rounding in product(("f32", "f64"), ("rn", "rz", "rm", "rp")):
            add(f"cvt.{rounding}.{f}.{t}", f, t)
            add(f"cvt.{rounding}i.{t}.{f}", t, f)
            add(f"cvt.{rounding}i.sat.{t}.{f}", t, f)
            if f == "f32":
                add(f"cvt.{rounding}i.ftz.{t}.f32", t, f)
    for t in ("u32", "s32", "u64", "s64"):
        add(f"mad.hi.{t}", t, t, t, t)
        add(f"sad.{t}", t, t, t, t)
        add(f"bfe.{t}", t, t, "u32", "u32")
        add(f"bfind.{t}", "u32", t)
        add(f"bfind.shiftamt.{t}", "u32", t)
    for t in ("u16", "s16", "u32", "s32"):
        wide = t[0] + str(2 * int(t[1:]))
        add(f"mul.wide.{t}", wide, t, t)
        add(f"mad.wide.{t}", wide, t, t, wide)
    for t in ("b32", "b64"):
        add(f"popc.{t}", "u32", t)
        add(f"clz.{t}", "u32", t)
        add(f"brev.{t}", t, t)
        add(f"bfi.{t}", t, t, t, "u32", "u32")
    for t in ("u32", "s32"):
        for part in ("lo", "hi"):
            add(f"mul24.{part}.{t}", t, t, t)
            add(f"mad24.{part}.{t}", t, t, t, t)
        for mode in ("wrap", "clamp"):
            add(f"szext.{mode}.{t}", t, t, "u32")
    for mode in ("wrap", "clamp"):
        add(f"bmsk.{mode}.b32", "b32", "u32", "u32")
        for way in ("l", "r"):
            add(f"shf.{way}.{mode}.b32", "b32", "b32", "b32", "u32")
    for name in ("add", "sub"):
        add(f"{name}.sat.s32", "s32", "s32", "s32")
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        add(f"prmt.b32{mode}", "b32", "b32", "b32", "b32")
    for table in (0x80, 0x96, 0xCA, 0x1E, 0xFE):
        add("lop3.b32", "b32", "b32", "b32", "b32", literals=(str(table),))
    for a, b in product(("u32", "s32"), repeat=2):
        add(f"dp4a.{a}.{b}", "s32" if "s32" in (a, b) else "u32", a, b, "s32" if "s32" in (a, b) else "u32")
        for half in ("lo", "hi"):
            add(f"dp2a.{half}.{a}.{b}", "s32" if "s32" in (a, b) else "u32", a, b, "s32" if "s32" in (a, b) else "u32")

    for t in ("f32", "f64"):
        flushes = ("", ".ftz") if t == "f32" else ("",)
        for rounding, flush in product(("rn", "rz", "rm", "rp"), flushes):
            saturations = ("", ".sat") if t == "f32" else ("",)
            for saturate in saturations:
                for name in ("add", "sub", "mul"):
                    add(f"{name}.{rounding}{flush}{saturate}.{t}", t, t, t)
                add(f"fma.{rounding}{flush}{saturate}.{t}", t, t, t, t)
            add(f"div.{rounding}{flush}.{t}", t, t, t)
            add(f"sqrt.{rounding}{flush}.{t}", t, t)
            add(f"rcp.{rounding}{flush}.{t}", t, t)
        for flush in flushes:
            add(f"abs{flush}.{t}", t, t)
            add(f"neg{flush}.{t}", t, t)
            for name in ("min", "max"):
                add(f"{name}{flush}.{t}", t, t, t)
                if t == "f32":
                    add(f"{name}{flush}.NaN.f32", t, t, t)
            for relation in (
                "eq",
                "ne",
                "lt",
                "le",
                "gt",
                "ge",
                "equ",
                "neu",
                "ltu",
                "leu",
                "gtu",
                "geu",
                "num",
                "nan",
            ):
                add(f"setp.{relation}{flush}.{t}", "pred", t, t)
        add(f"copysign.{t}", t, t, t)
        for kind in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            add(f"testp.{kind}.{t}", "pred", t)
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            add(f"cvt.{rounding}.{t}.{t}", t, t)
    for rounding in ("rn", "rz", "rm", "rp"):
        add(f"cvt.{rounding}.f32.f64", "f32", "f64")
    add("cvt.f64.f32", "f64", "f32")
    for rounding in ("rn", "rz"):
        add(f"cvt.{rounding}.f16.f32", "f16", "f32")
        add(f"cvt.{rounding}.bf16.f32", "bf16", "f32")
        add(f"cvt.{rounding}.f16x2.f32", "f16x2", "f32", "f32")
        add(f"cvt.{rounding}.bf16x2.f32", "bf16x2", "f32", "f32")
    add("cvt.f32.f16", "f32", "f16")
    add("cvt.f32.bf16", "f32", "bf16")
    for t in ("f16", "f16x2"):
        for flush, saturate in product(("", ".ftz"), ("", ".sat")):
            for name in ("add", "sub", "mul"):
                add(f"{name}.rn{flush}{saturate}.{t}", t, t, t)
            add(f"fma.rn{flush}{saturate}.{t}", t, t, t, t)
        add(f"fma.rn.relu.{t}", t, t, t, t)
    for t in ("bf16", "bf16x2"):
        add(f"fma.rn.{t}", t, t, t, t)
        add(f"fma.rn.relu.{t}", t, t, t, t)
    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        add(f"abs.{t}", t, t)
        add(f"neg.{t}", t, t)
        for name in ("min", "max"):
            add(f"{name}.{t}", t, t, t)
            add(f"{name}.NaN.{t}", t, t, t)
    # The bounds are those of the PTX ISA, in units in the last place of the larger magnitude of both results.
    add("rcp.approx.f32", "f32", "f32", ulp=2)
    add("sqrt.approx.f32", "f32", "f32", ulp=2)
    add("rsqrt.approx.f32", "f32", "f32", ulp=4)
    add("div.full.f32", "f32", "f32", "f32", ulp=4)
    add("ex2.approx.f32", "f32", "f32", ulp=4)
    return found


FORMS = _forms()
EDGES_32 = (0, 1, 2, 3, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x7F800000, 0xFF800000)
EDGES_32 += (0x7FC00000, 0x00800000, 0x007FFFFF, 0x80000000, 0x3F800000, 0xBF800000, 0x4F000000, 0x4F800000, 0x5F000000)
EDGES_32 += (0x7F7FFFFF, 0x00000001, 0x3F000000, 0x40490FDB, 0x00FF00FF, 0x01010101, 0x80008000, 0x7C007BFF, 0x3C003C00)


EDGES_64 = (
    0,
    1,
    63,
    64,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    0x7FF0000000000000,
    0xFFF0000000000000,
)
EDGES_64 += (0x7FF8000000000000, 0x0010000000000000, 0x000FFFFFFFFFFFFF, 0x3FF0000000000000, 0xBFF0000000000000)
EDGES_64 += (0x7FEFFFFFFFFFFFFF, 0x41DFFFFFFFC00000, 0x43E0000000000000, 0x3FE0000000000000, 0x8000000000000001)


def inputs(seed: int, threads: int = THREADS) -> np.ndarray:
    """Return ``WORDS`` words for each thread: edge values, small ones, floats of all sizes, doubles in pairs, and bits."""
    rng = np.random.default_rng(seed)
    shape = (threads, WORDS)
    if seed % 2 and seed // 2 >= len(FORMS):
        words = rng.choice(np.array(EDGES_32, np.uint32), shape)
        words[:, WORDS // 2 :] = rng.choice(np.array(EDGES_64, np.uint64), (threads, WORDS // 4)).view(np.uint32)
        return words
    words = rng.integers(0, 1 << 32, shape, np.uint32)
    pick = rng.random(shape)
    words = np.where(pick < 0.25, rng.choice(np.array(EDGES_32, np.uint32), shape), words)
    floats = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 7, shape)).astype(np.float32).view(np.uint32)
    words = np.where((pick >= 0.25) & (pick < 0.5), floats, words)
    words = np.where((pick >= 0.5) & (pick < 0.6), rng.integers(0, 100, shape, np.uint32), words)
    doubles = (rng.standard_normal((threads, WORDS // 4)) * 10.0 ** rng.integers(-9, 10, (threads, WORDS // 4))).view(
        np.uint32
    )
    words[:, WORDS // 2 :] = np.where(rng.random((threads, WORDS // 2)) < 0.6, doubles, words[:, WORDS // 2 :])
    return np.ascontiguousarray(words)


class Writer:
    """Writes the body of a kernel ``(in, out, counters)``; registers hold words, whatever type they are used as."""

    def __init__(self, seed: int, threads: int = THREADS) -> None:
        self.rng = random.Random(seed)
        self.threads = threads
        self.lines: list[str] = []
        self.count = Counter[str]()
        self.pool: dict[int, list[str]] = {2: [], 4: [], 8: [], 0: []}
        self.approximate = 0.0
        self.labels = 0

    def label(self) -> str:
        self.labels += 1
        return f"$L_{self.labels}"

    def new(self, size: int) -> str:
        letter = REGISTERS[size][1]
        self.count[letter] += 1
        return f"%{letter}{self.count[letter]}"

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def operand(self, type_name: str) -> str:
        return self.rng.choice(self.pool[SIZES[type_name]])

    def instruction(self, form: Form, sources: list[str]) -> str:
        target = self.new(SIZES[form.result])
        self.emit(f"{form.name} {', '.join([target, *sources, *form.literals])};")
        return self.without_nan(target, form.result)

    def without_nan(self, register: str, type_name: str) -> str:
        """A NaN's payload is not defined: make it always the same where it will be looked at as bits."""
        if type_name not in ("f32", "f64"):
            return register
        p, clean = self.new(0), self.new(SIZES[type_name])
        one = "0f7FFFFFFF" if type_name == "f32" else "0d7FFFFFFFFFFFFFFF"
        self.emit(f"testp.notanumber.{type_name} {p}, {register};")
        self.emit(f"selp.{type_name} {clean}, {one}, {register}, {p};")
        return clean

    def kernel(self, name: str) -> str:
        registers = [f".reg .{kind} %{letter}<{self.count[letter] + 1}>;" for kind, letter in REGISTERS.values()]
        head = [
            f".visible .entry {name}(.param .u64 in, .param .u64 out, .param .u64 counters) {{",
            *registers,
            ".reg .b64 %in, %out, %counters, %at; .reg .b32 %me, %offset, %shared_at, %other;",
            f".shared .align 4 .b32 shared_{name}[{self.threads}]; .local .align 4 .b32 local_{name}[8];",
            "mov.u32 %me, %tid.x;",
            "ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; ld.param.u64 %counters, [counters];",
            f"mad.wide.u32 %in, %me, {4 * WORDS}, %in;",
            f"mad.wide.u32 %out, %me, {4 * WORDS}, %out;",
        ]
        return "\n".join([*head, *self.lines, "ret;", "}"])

    def load_inputs(self) -> None:
        for index in range(WORDS // 2):
            register = self.new(4)
            self.emit(f"ld.global.u32 {register}, [%in+{4 * index}];")
            self.pool[4].append(register)
            half = self.new(2)
            self.emit(f"cvt.u16.u32 {half}, {register};")
            self.pool[2].append(half)
        for index in range(WORDS // 2, WORDS, 2):
            register = self.new(8)
            self.emit(f"ld.global.u64 {register}, [%in+{4 * index}];")
            self.pool[8].append(register)
        p = self.new(0)
        self.emit(f"setp.gt.s32 {p}, {self.pool[4][0]}, {self.pool[4][1]};")
        self.pool[0].append(p)

    def store(self, registers: list[str]) -> None:
        """Write words to the output, doubles as two."""
        word = 0
        for register in registers:
            if register[1] == "q":
                self.emit(f"st.global.v2.u32 [%out+{4 * word}], {{{self.halves(register)}}};")
                word += 2
            else:
                self.emit(f"st.global.u32 [%out+{4 * word}], {register};")
                word += 1

    def halves(self, register: str) -> str:
        low, high = self.new(4), self.new(4)
        self.emit(f"mov.b64 {{{low}, {high}}}, {register};")
        return f"{low}, {high}"


def instruction_kernel(seed: int, name: str, form: Form, threads: int = THREADS) -> str:
    """Return a kernel that applies one form to several operands."""
    writer = Writer(seed, threads)
    writer.load_inputs()
    results = []
    for _ in range(8):
        result = writer.instruction(form, [writer.operand(t) for t in form.sources])
        size = SIZES[form.result]
        if size == 0:
            word = writer.new(4)
            writer.emit(f"selp.u32 {word}, 1, 0, {result};")
            result = word
        elif size == 2:
            word = writer.new(4)
            writer.emit(f"cvt.u32.u16 {word}, {result};")
            result = word
        results.append(result)
    writer.store(results)
    return writer.kernel(name)


def _in_programs(form: Form) -> bool:
    """Whether a form's result is exact, and the same in a program as alone.

    NVIDIA's compiler takes some for what they are not where it puts instructions together: negation of a 16-bit number
    never overflows, a NaN converted to 64 bits and then narrowed is zero, of four ``mad.hi`` in an unrolled loop two get
    lost, and what ``sub`` took away ``add.sat`` gives back without saturating (driver 580.159, H200).
    """
    merged = ("abs.s16", "neg.s16", "mad.hi", "add.sat", "sub.sat")
    narrows = form.name.startswith("cvt.sat") and form.name.endswith("64") and SIZES[form.result] < 8
    kinds = {form.result, *form.sources}
    exact = not form.ulp and not kinds.intersection(("f16", "bf16", "f16x2", "bf16x2"))
    return exact and not narrows and not form.name.startswith(merged)


EXACT = [form for form in FORMS if _in_programs(form)]


def program_kernel(seed: int, name: str, forms: list[Form], threads: int = THREADS) -> str:
    """Return a kernel of random code made of `forms`, which all threads of the only block run."""
    writer = Writer(seed, threads)
    writer.load_inputs()
    rng = writer.rng
    labels = Counter[str]()

    def label() -> str:
        labels["l"] += 1
        return f"$L_{name}_{labels['l']}"

    def statement() -> None:
        form = rng.choice(forms)
        result = writer.instruction(form, [writer.operand(t) for t in form.sources])
        pool = writer.pool[SIZES[form.result]]
        if SIZES[form.result] == 0:
            pool.append(result)
        else:  # into a register that exists on every way through the code
            kind = {2: "b16", 4: "b32", 8: "b64"}[SIZES[form.result]]
            writer.emit(f"mov.{kind} {rng.choice(pool)}, {result};")

    def block(length: int, depth: int) -> None:
        known = list(writer.pool[0])
        for _ in range(length):
            what = rng.random()
            if what < 0.75 or depth > 2:
                statement()
            elif what < 0.88:
                branch(depth)
            else:
                loop(depth)
        writer.pool[0] = known  # predicates made here are not set elsewhere

    def branch(depth: int) -> None:
        other, end = label(), label()
        writer.emit(f"@!{rng.choice(writer.pool[0])} bra {other};")
        block(rng.randrange(1, 5), depth + 1)
        writer.emit(f"bra {end};\n{other}:")
        if rng.random() < 0.5:
            block(rng.randrange(1, 5), depth + 1)
        writer.emit(f"{end}:")

    def loop(depth: int) -> None:
        top, counter, more = label(), writer.new(4), writer.new(0)
        writer.emit(f"and.b32 {counter}, {rng.choice(writer.pool[4])}, 7;\n{top}:")
        block(rng.randrange(1, 4), depth + 1)
        writer.emit(f"sub.u32 {counter}, {counter}, 1;\nsetp.gt.s32 {more}, {counter}, 0;\n@{more} bra {top};")

    def together() -> None:
        """Something that all threads do."""
        source, target = rng.choice(writer.pool[4]), rng.choice(writer.pool[4])
        result, p = writer.new(4), rng.choice(writer.pool[0])
        what = rng.randrange(7)
        if what == 0:
            mode = rng.choice(("idx", "up", "down", "bfly"))
            clamp = 0 if mode == "up" else 31
            writer.emit(f"shfl.sync.{mode}.b32 {result}, {source}, {rng.randrange(32)}, {clamp}, 0xffffffff;")
        elif what == 1:
            writer.emit(f"vote.sync.ballot.b32 {result}, {p}, 0xffffffff;")
        elif what == 2:
            writer.emit(f"and.b32 {result}, {source}, 3;\nmatch.any.sync.b32 {result}, {result}, 0xffffffff;")
        elif what == 3:
            operation = rng.choice(("add.u32", "min.u32", "max.s32", "and.b32", "or.b32", "xor.b32"))
            name_, kind = operation.split(".")
            writer.emit(f"redux.sync.{name_}.{kind} {result}, {source}, 0xffffffff;")
        elif what == 4:
            step = rng.randrange(1, threads)
            writer.emit(
                f"bar.sync 0;\nmov.u32 %shared_at, shared_{name};\nmad.lo.u32 %offset, %me, 4, %shared_at;\n"
                f"st.shared.u32 [%offset], {source};\nbar.sync 0;\nadd.u32 %other, %me, {step};\n"
                f"and.b32 %other, %other, {threads - 1};\nmad.lo.u32 %offset, %other, 4, %shared_at;\n"
                f"ld.shared.u32 {result}, [%offset];"
            )
        elif what == 5:
            writer.emit(
                f"and.b32 %other, {source}, 15;\nmul.wide.u32 %at, %other, 4;\nadd.u64 %at, %at, %counters;\n"
                f"red.global.add.u32 [%at], {rng.choice(writer.pool[4])};\nmov.b32 {result}, {source};"
            )
        else:
            writer.emit(
                f"and.b32 %other, {source}, 7;\nmul.wide.u32 %at, %other, 4;\nmov.u64 %in, local_{name};\n"
                + "".join(f"st.local.u32 [%in+{4 * i}], {rng.choice(writer.pool[4])};\n" for i in range(8))
                + f"add.u64 %at, %at, %in;\nld.local.u32 {result}, [%at];"
            )
        writer.emit(f"mov.b32 {target}, {result};")

    def apart() -> None:
        """Something that the threads of a warp do together which took the same way, on both ways."""
        p, other, end = rng.choice(writer.pool[0]), label(), label()
        taken, rest = writer.new(4), writer.new(4)
        writer.emit(f"vote.sync.ballot.b32 {taken}, {p}, 0xffffffff;\nnot.b32 {rest}, {taken};\n@!{p} bra {other};")
        some(taken)
        writer.emit(f"bra {end};\n{other}:")
        some(rest)
        writer.emit(f"{end}:")

    def some(mask: str) -> None:
        block(rng.randrange(3), 2)
        source, target, result = rng.choice(writer.pool[4]), rng.choice(writer.pool[4]), writer.new(4)
        what = rng.randrange(4)
        if what == 0:
            last = writer.new(4)
            writer.emit(f"bfind.u32 {last}, {mask};\nshfl.sync.idx.b32 {result}, {source}, {last}, 31, {mask};")
        elif what == 1:
            writer.emit(f"vote.sync.ballot.b32 {result}, {rng.choice(writer.pool[0])}, {mask};")
        elif what == 2:
            writer.emit(f"and.b32 {result}, {source}, 3;\nmatch.any.sync.b32 {result}, {result}, {mask};")
        else:
            name_, kind = rng.choice(("add.u32", "min.u32", "max.s32", "xor.b32")).split(".")
            writer.emit(f"redux.sync.{name_}.{kind} {result}, {source}, {mask};")
        writer.emit(f"mov.b32 {target}, {result};")
        block(rng.randrange(3), 2)

    for _ in range(rng.randrange(2, 5)):
        block(rng.randrange(3, 12), 0)
        together()
        if rng.random() < 0.5:
            apart()
    writer.store([*writer.pool[4], *writer.pool[8][: (WORDS - len(writer.pool[4])) // 2]])
    return writer.kernel(name)


def kernel_of(seed: int) -> tuple[str, str, float]:
    """Return the PTX of a seed's kernel, what it is about, and the allowed error in units in the last place."""
    if seed % 2:
        form = FORMS[seed // 2 % len(FORMS)]
        return instruction_kernel(seed, f"k{seed}", form), f"{form.name} -> {form.result}", form.ulp
    return program_kernel(seed, f"k{seed}", EXACT), "program", 0.0


def module_of(kernels: list[str]) -> str:
    return "\n".join([".version 8.3\n.target sm_90\n.address_size 64", *kernels])


def run(seeds: range, optimize: int | None = None) -> dict[str, np.ndarray]:
    """Return, for each seed, what the kernel wrote: a row of words for each thread, and one of counters.

    With `optimize`, NVIDIA's compiler is given that level in place of its own, 3.
    """
    import cudatool as ct
    from cudatool.runtime import calls

    results = {}
    for first in range(seeds.start, seeds.stop, BATCH):
        batch = range(first, min(first + BATCH, seeds.stop))
        ct.synchronize()
        core = calls.core
        code = core.ObjectCode.from_ptx(module_of([kernel_of(seed)[0] for seed in batch]).encode())
        if optimize is not None:
            options = core.LinkerOptions(arch="sm_90", optimization_level=optimize)
            code = core.Linker(code, options=options).link("cubin")
        for seed in batch:
            given, out, counters = (
                ct.asarray(inputs(seed)),
                ct.zeros((THREADS, WORDS), np.uint32),
                ct.zeros(WORDS, np.uint32),
            )
            kernel = ct.Kernel(code.get_kernel(f"k{seed}"), f"k{seed}")
            kernel[(1, THREADS)](given, out, counters)
            results[str(seed)] = np.vstack([out.get(), counters.get()])
    return results


def differences(seed: int, one: np.ndarray, other: np.ndarray) -> str:
    """Return what is different in two devices' results of a seed, empty if nothing is."""
    _, about, ulp = kernel_of(seed)
    different = one != other
    result = about.rpartition("-> ")[2]
    if result in ("f16", "bf16", "f16x2", "bf16x2"):
        different &= ~(_half_nans(one, result) & _half_nans(other, result) & _same_rest(one, other, result))
    elif ulp:
        a, b = one.view(np.float32).astype(np.float64), other.view(np.float32).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            unit = np.spacing(
                np.maximum(np.abs(one.view(np.float32)), np.abs(other.view(np.float32))).astype(np.float32)
            )
            close = np.abs(a - b) <= ulp * unit
        different &= ~(close | (np.isnan(a) & np.isnan(b)))
    if not different.any():
        return ""
    thread, word = map(int, np.argwhere(different)[0])
    text = f"seed {seed} ({about}): {int(different.sum())} of {different.size} words; thread {thread}, word {word}: "
    return text + f"{one[thread, word]:#010x} != {other[thread, word]:#010x}"


def _parts(words: np.ndarray) -> np.ndarray:
    return np.stack([words & 0xFFFF, words >> 16]).astype(np.uint32)


def _part_nans(parts: np.ndarray, kind: str) -> np.ndarray:
    return (parts & 0x7FFF) > (0x7F80 if kind.startswith("bf16") else 0x7C00)


def _half_nans(words: np.ndarray, kind: str) -> np.ndarray:
    """Return where a word has a NaN in some half."""
    return np.asarray(_part_nans(_parts(words), kind).any(axis=0))


def _same_rest(one: np.ndarray, other: np.ndarray, kind: str) -> np.ndarray:
    """Return where the halves are the same but for NaNs in both."""
    a, b = _parts(one), _parts(other)
    return np.asarray(((a == b) | (_part_nans(a, kind) & _part_nans(b, kind))).all(axis=0))


def compare(one: Path, other: Path) -> int:
    first, second = np.load(one), np.load(other)
    seeds = sorted(map(int, set(first.files) & set(second.files)))
    found = [text for seed in seeds if (text := differences(seed, first[str(seed)], second[str(seed)]))]
    print(f"{len(seeds)} kernels ({sum(seed % 2 for seed in seeds)} of single instructions), {len(found)} differ")
    for text in found[:100]:
        print("  " + text)
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="FIRST:STOP")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path)
    parser.add_argument("--optimize", type=int, metavar="LEVEL", help="the level of NVIDIA's compiler")
    parser.add_argument("--show", type=int, help="print the PTX of a seed")
    options: Any = parser.parse_args(arguments)
    if options.show is not None:
        print(module_of([kernel_of(options.show)[0]]))
        return 0
    if options.compare:
        return compare(*options.compare)
    if options.out is None:
        parser.error("--out or --compare is needed")
    first, stop = map(int, options.seeds.split(":"))
    results: Any = run(range(first, stop), options.optimize)
    np.savez_compressed(options.out, **results)
    print(f"seeds {first} to {stop - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
