"""Random kernels whose addresses are sums of indices, or nearly: racecheck against brute force.

    python tests/sim/jit/affine_kernels.py [CASES] [SEED]

A case is a kernel of a few accesses to shared and device memory, with barriers, loops and guards. The oracle writes down
what each thread accesses between which barriers, and compares every pair. It knows nothing of forms. Distances are such
that accesses of different threads often touch by a byte, interleave, run backwards or meet in a later round of a loop.
"""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from cudatool.sim import jit
from cudatool.sim.jit import Instrument
from cudatool.sim.jit.independent import OfLaunch

SHARED, GLOBAL = 192, 512  # bytes
SHAPES = [(1, 1), (2, 1), (7, 1), (33, 1), (40, 1), (4, 3), (5, 2), (8, 4), (2, 8)]


@dataclass(frozen=True)
class Access:
    """An access of each thread, or of those whose x is below `below`; the address grows by `step` in a round.

    `branches` says whether a branch leaves the other threads out, rather than a guard.
    """

    space: str
    mode: str
    width: int
    start: int
    tx: int
    ty: int
    bx: int
    step: int
    below: int
    number: int
    in_loop: bool
    by_bits: bool
    branches: bool


@dataclass
class Loop:
    """Rounds of the accesses and barriers in it."""

    rounds: int
    body: list[Access | str] = field(default_factory=list)


class Case:
    """A random kernel, and a launch of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.block, self.blocks = self.random.choice(SHAPES), self.random.choice((1, 1, 2, 3))
        self.accesses: list[Access] = []
        self.code: list[Access | Loop | str] = ["fence"] if self.random.random() < 0.2 else []  # orders nothing alone
        for _ in range(self.random.randrange(1, 6)):
            what = self.random.random()
            if what < 0.25:
                self.code.append("barrier")
            elif what < 0.45:
                loop = Loop(self.random.randrange(1, 4))
                for _ in range(self.random.randrange(1, 4)):
                    loop.body.append("barrier" if self.random.random() < 0.3 else self.access(in_loop=True))
                self.code.append(loop)
            else:
                self.code.append(self.access(in_loop=False))

    def access(self, in_loop: bool) -> Access:
        pick = self.random.choice
        space = pick(("shared", "global"))
        size, (x, y) = SHARED if space == "shared" else GLOBAL, self.block
        for _ in range(1000):
            width = pick((1, 2, 4, 4, 4, 8))
            tx = width * pick((0, 1, 1, 1, 1, 2, 3, -1))
            if space == "global" and self.random.random() < 0.15:
                tx -= 1  # the last byte is the next thread's first one
            ty = pick((tx * x, tx * x, tx * x + width, tx * x - width, width, 0))
            own = abs(tx) * (x - 1) + abs(ty) * (y - 1) + width
            bx = pick((0, own, own, own + width, own - width, tx * x * y)) // width * width if space == "global" else 0
            step = width * pick((0, 0, 1, x, x * y)) if in_loop else 0
            reach = [tx * (x - 1), ty * (y - 1), bx * (self.blocks - 1), step * 2]
            low, high = sum(one for one in reach if one < 0), sum(one for one in reach if one > 0)
            room = size - width - (high - low)
            if room >= 0:
                start = -low + pick((0, 0, width, room)) // width * width
                start += space == "global" and self.random.random() < 0.05  # not aligned
                if start + low >= 0 and start + high + width <= size:
                    break
        else:
            raise AssertionError
        mode = pick(("read", "read", "write", "write", "atomic" if width == 4 else "write"))
        below = pick((0, 0, 0, 1, x - 1)) if x > 1 else 0
        by_bits, branches = self.random.random() < 0.15, self.random.random() < 0.5
        number = len(self.accesses)
        found = Access(space, mode, width, start, tx, ty, bx, step, below, number, in_loop, by_bits, branches)
        self.accesses.append(found)
        return found

    # ---- the kernel ----

    def ptx(self) -> str:
        self.lines: dict[int, int] = {}  # of each access
        text = f""".version 7.8
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 zero)
{{
.reg .pred %q<{20 + 8 * len(self.accesses)}>;
.reg .b16 %h<4>;
.reg .b32 %r<{20 + 8 * len(self.accesses)}>;
.reg .b64 %d<{20 + 8 * len(self.accesses)}>;
.shared .align 16 .b8 window[{SHARED}];
ld.param.u64 %d0, [p];
cvta.to.global.u64 %d1, %d0;
mov.u32 %r0, %tid.x;
mov.u32 %r1, %tid.y;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, window;
mov.b32 %r5, 7;
mov.b64 %d2, 7;
mov.b16 %h0, 7;
""".splitlines()
        for number, item in enumerate(self.code):
            if isinstance(item, Loop):
                text += ["mov.u32 %r4, 0;", f"LOOP{number}:"]
                for inner in item.body:
                    text += self.statement(inner, len(text))
                text += ["add.s32 %r4, %r4, 1;", f"setp.lt.s32 %q0, %r4, {item.rounds};", f"@%q0 bra LOOP{number};"]
            else:
                text += self.statement(item, len(text))
        return "\n".join([*text, "ret;", "}", ""])

    def statement(self, item: Access | str, before: int) -> list[str]:
        if isinstance(item, str):
            return ["bar.sync 0;" if item == "barrier" else "membar.gl;"]
        a, r, d = item, 20 + 8 * item.number, 20 + 8 * item.number
        text = [
            f"mul.lo.s32 %r{r}, %r0, {a.tx};",
            f"mad.lo.s32 %r{r + 1}, %r1, {a.ty}, %r{r};",
            f"mad.lo.s32 %r{r + 2}, %r2, {a.bx}, %r{r + 1};",
        ]
        last = r + 2
        if a.by_bits:  # the same number, in a way that is not followed
            text.append(f"xor.b32 %r{r + 3}, %r{last}, 0;")
            last = r + 3
        if a.step:
            text.append(f"mad.lo.s32 %r{r + 4}, %r4, {a.step}, %r{last};")
            last = r + 4
        if a.space == "shared":
            text.append(f"add.s32 %r{r + 5}, %r3, %r{last};")
            at = f"[%r{r + 5}+{a.start}]"
        else:
            text += [f"cvt.s64.s32 %d{d}, %r{last};", f"add.s64 %d{d + 1}, %d1, %d{d};"]
            at = f"[%d{d + 1}+{a.start}]"
        value = {1: "%h1", 2: "%h1", 4: "%r6", 8: "%d3"}[a.width]
        source = {1: "%h0", 2: "%h0", 4: "%r5", 8: "%d2"}[a.width]
        guard = after = ""
        if a.below:
            text.append(f"setp.lt.s32 %q{r}, %r0, {a.below};")
            text.append(f"setp.gt.u32 %q{r + 1}, %r2, {self.blocks};")  # never
            text.append(f"or.pred %q{r + 2}, %q{r + 1}, %q{r};")
            guard = f"@%q{r} "
            if a.branches:
                text += [f"not.pred %q{r + 3}, %q{r + 2};", f"@%q{r + 3} bra SKIP{a.number};"]
                guard, after = "", f"SKIP{a.number}:"
        text.append(
            {
                "read": f"{guard}ld.{a.space}.u{8 * a.width} {value}, {at};",
                "write": f"{guard}st.{a.space}.u{8 * a.width} {at}, {source};",
                "atomic": f"{guard}red.{a.space}.add.u32 {at}, {source};",
            }[a.mode]
        )
        self.lines[a.number] = before + len(text)
        return [*text, after]

    # ---- the oracle ----

    def races(self) -> dict[tuple[int, int], set[tuple[int, int]]]:
        """Return the pairs of lines that race, the lower one first, and on which bytes of which memory."""
        touched: dict[tuple[int, int], set[tuple[int, int, int, int]]] = {}
        (x, y), phase = self.block, 0

        def note(a: Access, turn: int) -> None:
            for bx, ty, tx in product(range(self.blocks), range(y), range(x)):
                if not a.below or tx < a.below:
                    first = a.start + tx * a.tx + ty * a.ty + bx * a.bx + turn * a.step
                    for byte in range(first, first + a.width):
                        place = (bx if a.space == "shared" else -1), byte
                        touched.setdefault(place, set()).add((bx, ty * x + tx, phase, a.number))

        for item in self.code:
            for turn in range(item.rounds if isinstance(item, Loop) else 1):
                for one in item.body if isinstance(item, Loop) else [item]:
                    if isinstance(one, str):
                        phase += one == "barrier"
                    else:
                        note(one, turn)
        found: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for place, accesses in touched.items():
            for old, new in product(accesses, accesses):
                modes = {self.accesses[one[3]].mode for one in (old, new)}
                ordered = old[:2] == new[:2] or (old[0] == new[0] and old[2] != new[2])
                if not ordered and modes not in ({"read"}, {"atomic"}):
                    lines = sorted((self.lines[old[3]], self.lines[new[3]]))
                    found.setdefault((lines[0], lines[1]), set()).add(place)
        return found

    # ---- the comparison ----

    def load(self) -> None:
        self.kernel = jit.load(self.ptx().encode()).kernels["k"]
        whole = np.zeros(3 * 4096, np.uint8)
        self.memory = whole[-whole.ctypes.data % 4096 :][:8192]
        self.params = (ctypes.c_uint64 * 2)(self.memory.ctypes.data, 0)

    def independent(self) -> frozenset[int]:
        """Return the lines that are not looked at."""
        self.load()
        start = self.memory.ctypes.data
        arguments = bytes(self.params)[: self.kernel.layout.param_bytes]
        shape = (self.blocks, 1, 1), (*self.block, 1)
        device = range(start, start + 4096)
        return self.kernel._independent.of_launch(arguments, *shape, device, self.kernel._address_of).lines

    def limits(self) -> dict[int, tuple[int, int]]:
        """Return, for the line of each access whose address is a form, between which addresses it is said to lie."""
        self.load()
        addresses = self.kernel._independent._addresses
        arguments = bytes(self.params)[: self.kernel.layout.param_bytes]
        forms = addresses.forms(arguments, (self.blocks, 1, 1), (*self.block, 1), self.kernel._address_of)
        return {
            site.line: (form.low, form.high + site.width)
            for site, form in zip(addresses.sites, forms, strict=True)
            if form is not None
        }

    def wrong(self) -> str:
        """Return which accesses race that are not looked at, or lie elsewhere than is said."""
        independent, races = self.independent(), self.races()
        wrong: list[object] = [pair for pair in races if independent.intersection(pair)]
        limits, (x, y) = self.limits(), self.block
        for a in self.accesses:
            base = self.memory.ctypes.data if a.space == "global" else 0
            for bx, ty, tx in product(range(self.blocks), range(y), range(a.below or x)):
                first = base + a.start + tx * a.tx + ty * a.ty + bx * a.bx
                low, high = limits.get(self.lines[a.number], (first, first + a.width))
                if not low <= first <= high - a.width:
                    wrong.append((a, low, high, first))
        return f"{self.code}: {wrong}" if wrong else ""

    def difference(self) -> str:
        """Return what a launch under racecheck says wrongly, empty if nothing."""
        if wrong := self.wrong():
            return wrong
        shadow = jit.Shadow(self.memory.ctypes.data, 4096, Instrument.RACECHECK)
        found = self.kernel.launch(
            grid=(self.blocks, 1, 1),
            block=(*self.block, 1),
            shared_bytes=0,
            params=ctypes.addressof(self.params),
            shadow=shadow,
        )
        races = self.races()
        said = {(min(one.line, one.other_line), max(one.line, one.other_line)) for one in found}
        if false := said - races.keys():
            return f"{self.code}: false: {sorted(false)}"
        lines = {one.line for one in found}
        seen = {place for pair, places in races.items() if lines.intersection(pair) for place in places}
        missed = set().union(*races.values()) - seen
        return f"{self.code}: missed on {sorted(missed)}" if missed else ""

    def difference_of_memory(self) -> str:
        """Return which of the other checks' findings are lost, or new, by leaving out checks that look needless.

        A part of the memory can be used, and a part of that has values.
        """
        self.load()
        start, pick = self.memory.ctypes.data, self.random.choice
        size = pick((4, 64, 200, 256, GLOBAL, GLOBAL + 4096))
        first = self.random.randrange(0, size)
        stop = self.random.randrange(first, size + 1) if self.random.random() < 0.5 else size
        found = []
        for everything in (False, True):
            shadow = jit.Shadow(start, 8192, Instrument.MEMCHECK | Instrument.INITCHECK)
            shadow.allocated(start, size)
            shadow.written(start + first, stop - first)
            if everything:
                self.load()
                self.params[0] = start
                self.kernel.__dict__["_independent"] = _Nothing()
            defects = []
            for _ in range(2):  # the second launch finds what the first one wrote
                defects += self.kernel.launch(
                    grid=(self.blocks, 1, 1),
                    block=(*self.block, 1),
                    shared_bytes=0,
                    params=ctypes.addressof(self.params),
                    shadow=shadow,
                )
            found.append(sorted((one.defect, one.line, one.address, one.thread, one.count) for one in defects))
        self.defects = len(found[1])
        return f"{self.code}: {found}" if found[0] != found[1] else ""


class _Nothing:
    """Of no launch is anything known."""

    def of_launch(self, *_: object) -> OfLaunch:
        return OfLaunch(frozenset(), None, (), frozenset())


def campaign(cases: int, seed: int = 0) -> list[str]:
    """Return the differences of so many launches."""
    found = ((number, Case(number).difference()) for number in range(seed, seed + cases))
    return [f"case {number}: {text}" for number, text in found if text]


if __name__ == "__main__":
    differences = campaign(*([int(argument) for argument in sys.argv[1:]] or [500]))
    print("\n".join(differences[:20]))
    print(f"{len(differences)} differences")
    sys.exit(bool(differences))
