"""Random kernels whose addresses are sums of indices, or nearly: racecheck against brute force.

    python tests/sim/jit/affine_kernels.py [CASES] [SEED]

A case is a kernel of a few accesses to shared and device memory, with barriers, loops and guards. The oracle writes down
what each thread accesses between which barriers, and compares every pair; of reads through the read-only cache it looks
whether any thread writes there. It knows nothing of forms. Distances are such
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
from cudatool.sim.jit import DefectCode, Instrument
from cudatool.sim.jit.argument_ranges import ArgumentRanges
from cudatool.sim.jit.independent import LaunchFacts

SHARED, GLOBAL = 192, 512  # bytes
SHAPES = [(1, 1), (2, 1), (7, 1), (33, 1), (40, 1), (4, 3), (5, 2), (8, 4), (2, 8)]

_MEMORY = (Instrument.MEMCHECK, Instrument.INITCHECK, Instrument.MEMCHECK | Instrument.INITCHECK)


@dataclass(frozen=True)
class Access:
    """An access of each thread, or of those whose x is below `below`; the address grows by `step` in a round.

    `branches` says whether a branch leaves the other threads out, rather than a guard, and `walks` whether the loop adds
    the step to the address, rather than that the address is computed from the loop's counter.
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
    walks: bool


@dataclass
class Loop:
    """Rounds of the accesses and barriers in it, and perhaps of another loop around it.

    The counter begins at `first` and `tx` times the thread's x. After each round `by` is added to it; another round
    follows while it is, by `relation`, before `limit`.
    """

    first: int
    by: int
    tx: int
    relation: str
    limit: int
    around: int
    early: bool
    """The counter is changed before the accesses."""
    body: list[Access | str] = field(default_factory=list)

    def counts(self, x: int) -> list[int]:
        """Return the counter's values at the accesses of a thread, in the order of its rounds."""
        found, value = [], self.first + self.tx * x
        goes_on = {"lt": int.__lt__, "le": int.__le__, "gt": int.__gt__, "ge": int.__ge__, "ne": int.__ne__}
        while True:
            found.append(value + self.by * self.early)
            value += self.by
            if not goes_on[self.relation](value, self.limit):
                return found * self.around


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
                self.code.append(self.loop())
            else:
                self.code.append(self.access(None))

    def loop(self) -> Loop:
        pick = self.random.choice
        rounds, by, tx = self.random.randrange(1, 4), pick((1, 1, 2, 3, -1, -2)), pick((0, 0, 1, 2))
        first = pick((0, 0, 1, 5, -3))
        relation = pick(("lt", "lt", "le", "ne")) if by > 0 else pick(("gt", "ge", "ne"))
        if relation == "ne":
            tx = 0
        # Less by a part of a step, but where the counter must be met.
        limit = first + by * rounds - (relation != "ne" and abs(by) > 1 and pick((0, 1))) * (1 if by > 0 else -1)
        limit -= by * (relation in ("le", "ge"))
        if tx and self.random.random() < 0.5:
            limit += tx * (self.block[0] - 1)  # threads have different numbers of rounds
        loop = Loop(first, by, tx, relation, limit, pick((1, 1, 1, 2)), pick((False, False, True)))
        for _ in range(self.random.randrange(1, 4)):
            same = len({len(loop.counts(x)) for x in range(self.block[0])}) == 1
            loop.body.append("barrier" if same and self.random.random() < 0.3 else self.access(loop))
        return loop

    def access(self, loop: Loop | None) -> Access:
        pick = self.random.choice
        space = pick(("shared", "global"))
        size, (x, y) = SHARED if space == "shared" else GLOBAL, self.block
        counts = [count for thread in range(x) for count in loop.counts(thread)] if loop else [0]
        for _ in range(1000):
            width = pick((1, 2, 4, 4, 4, 8))
            tx = width * pick((0, 1, 1, 1, 1, 2, 3, -1))
            if space == "global" and self.random.random() < 0.15:
                tx -= 1  # the last byte is the next thread's first one
            ty = pick((tx * x, tx * x, tx * x + width, tx * x - width, width, 0))
            own = abs(tx) * (x - 1) + abs(ty) * (y - 1) + width
            bx = pick((0, own, own, own + width, own - width, tx * x * y)) // width * width if space == "global" else 0
            step = width * pick((0, 0, 1, 1, x, x * y)) if loop else 0
            reach = [tx * (x - 1), ty * (y - 1), bx * (self.blocks - 1), step * min(counts), step * max(counts)]
            low, high = sum(one for one in reach if one < 0), sum(one for one in reach if one > 0)
            room = size - width - (high - low)
            if room >= 0:
                start = -low + pick((0, 0, width, room)) // width * width
                start += space == "global" and self.random.random() < 0.05  # not aligned
                if start + low >= 0 and start + high + width <= size:
                    break
        else:
            raise AssertionError
        reads = "read", "cached" if space == "global" else "read"
        mode = pick((*reads, "write", "write", "atomic" if width == 4 else "write"))
        below = pick((0, 0, 0, 1, x - 1)) if x > 1 else 0
        by_bits, branches = self.random.random() < 0.15, self.random.random() < 0.5
        number = len(self.accesses)
        walks = loop is not None and self.random.random() < 0.4
        found = Access(
            space, mode, width, start, tx, ty, bx, step, below, number, loop is not None, by_bits, branches, walks
        )
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
.reg .b32 %c<8>, %o<8>, %w<40>;
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
ld.param.u32 %r8, [zero];
""".splitlines()
        for number, item in enumerate(self.code):
            if isinstance(item, Loop):
                text += self.rounds(number, item, len(text))
            else:
                text += self.statement(item, len(text))
        return "\n".join([*text, "ret;", "}", ""])

    def rounds(self, number: int, loop: Loop, before: int) -> list[str]:
        c, q = f"%c{number}", f"%q{2 * number}"
        text = [f"mov.u32 %o{number}, 0;", f"AROUND{number}:", f"mad.lo.s32 {c}, %r0, {loop.tx}, {loop.first};"]
        walking = [one for one in loop.body if isinstance(one, Access) and one.walks]
        # What a pointer begins with is known of the counter: it has the value of the round that is to come.
        text += [f"mul.lo.s32 %w{a.number}, {c}, {a.step};" for a in walking]
        text.append(f"LOOP{number}:")
        grow = [f"add.s32 %w{a.number}, %w{a.number}, {a.step * loop.by};" for a in walking]
        count = [f"add.s32 {c}, {c}, {loop.by};"]
        text += [*count, *grow] if loop.early else []
        for inner in loop.body:
            text += self.statement(inner, before + len(text), c)
        text += [] if loop.early else [*grow, *count]
        text += [f"setp.{loop.relation}.s32 {q}, {c}, {loop.limit};", f"@{q} bra LOOP{number};"]
        again = f"setp.lt.s32 %q{2 * number + 1}, %o{number}, {loop.around};"
        return [*text, f"add.s32 %o{number}, %o{number}, 1;", again, f"@%q{2 * number + 1} bra AROUND{number};"]

    def statement(self, item: Access | str, before: int, counter: str = "") -> list[str]:
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
            walked = f"add.s32 %r{r + 4}, %w{a.number}, %r{last};"
            text.append(walked if a.walks else f"mad.lo.s32 %r{r + 4}, {counter}, {a.step}, %r{last};")
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
                "cached": f"{guard}ld.{a.space}.nc.u{8 * a.width} {value}, {at};",
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

        def note(a: Access, counts: list[list[int]], turn: int) -> None:
            for bx, ty, tx in product(range(self.blocks), range(y), range(x)):
                if turn < len(counts[tx]) and (not a.below or tx < a.below):
                    first = a.start + tx * a.tx + ty * a.ty + bx * a.bx + counts[tx][turn] * a.step
                    self.reached.setdefault(a.number, set()).add(first)
                    for byte in range(first, first + a.width):
                        place = (bx if a.space == "shared" else -1), byte
                        touched.setdefault(place, set()).add((bx, ty * x + tx, phase, a.number))

        self.reached: dict[int, set[int]] = {}  # where accesses begin
        for item in self.code:
            counts = [item.counts(thread) if isinstance(item, Loop) else [0] for thread in range(x)]
            for turn in range(max(map(len, counts))):
                for one in item.body if isinstance(item, Loop) else [item]:
                    if isinstance(one, str):
                        phase += one == "barrier"
                    else:
                        note(one, counts, turn)
        found: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self.stale: dict[int, set[tuple[int, int]]] = {}  # bytes at which a line reads what the launch writes
        self.unseen: set[int] = set()  # the lines that write there
        for place, accesses in touched.items():
            writes = {self.lines[one[3]] for one in accesses if self.accesses[one[3]].mode in ("write", "atomic")}
            reads = {self.lines[one[3]] for one in accesses if self.accesses[one[3]].mode == "cached"}
            for line in reads if writes else ():
                self.stale.setdefault(line, set()).add(place)
            self.unseen |= writes if reads else set()
            for old, new in product(accesses, accesses):
                modes = {self.accesses[one[3]].mode.replace("cached", "read") for one in (old, new)}
                ordered = old[:2] == new[:2] or (old[0] == new[0] and old[2] != new[2])
                if not ordered and modes not in ({"read"}, {"atomic"}):
                    lines = sorted((self.lines[old[3]], self.lines[new[3]]))
                    found.setdefault((lines[0], lines[1]), set()).add(place)
        return found

    # ---- the comparison ----

    def load(self) -> None:
        self.kernel = jit.load(self.ptx().encode()).kernels["k"]
        whole = np.zeros(4 * 4096, np.uint8)
        self.memory = whole[-whole.ctypes.data % 4096 :][: 3 * 4096]
        self.params = (ctypes.c_uint64 * 2)(self.memory.ctypes.data, 0)

    def independent(self) -> frozenset[int]:
        """Return the lines that are not looked at."""
        self.load()
        start = self.memory.ctypes.data
        arguments = bytes(self.params)[: self.kernel.layout.param_bytes]
        shape = (self.blocks, 1, 1), (*self.block, 1)
        device = range(start, start + 4096)
        return self.kernel.checks.independent.of_launch(arguments, *shape, device, self.kernel.text.address_of).lines

    def limits(self) -> dict[int, tuple[int, int]]:
        """Return, for the line of each access whose address is a form, between which addresses it is said to lie."""
        self.load()
        addresses = self.kernel.checks.independent._addresses
        arguments = bytes(self.params)[: self.kernel.layout.param_bytes]
        forms = addresses.forms(arguments, (self.blocks, 1, 1), (*self.block, 1), self.kernel.text.address_of).forms
        return {
            site.line: (form.low, form.high + site.width)
            for site, form in zip(addresses.sites, forms, strict=True)
            if form is not None
        }

    def wrong(self) -> str:
        """Return which accesses race that are not looked at, or lie elsewhere than is said."""
        independent, races = self.independent(), self.races()
        wrong: list[object] = [pair for pair in races if independent.intersection(pair)]
        wrong += independent.intersection({*self.stale, *self.unseen})
        limits = self.limits()
        for a in self.accesses:
            base = self.memory.ctypes.data if a.space == "global" else 0
            for first in self.reached.get(a.number, ()):
                low, high = limits.get(self.lines[a.number], (base + first, base + first + a.width))
                if not low <= base + first <= high - a.width:
                    wrong.append((a, low - base, high - base, first))
        return f"{self.code}: {wrong}" if wrong else ""

    def difference(self) -> str:
        """Return what a launch under racecheck says wrongly, empty if nothing."""
        if wrong := self.wrong():
            return wrong
        shadow = jit.Shadow(self.memory.ctypes.data, 4096, Instrument.RACECHECK)
        found = self.kernel.launch(
            jit.LaunchShape((self.blocks, 1, 1), (*self.block, 1)),
            ctypes.addressof(self.params),
            jit.LaunchOptions(shadow=shadow),
        )
        races = self.races()
        stale = {one.line for one in found if one.defect is DefectCode.STALE_READ}
        if false := stale - self.stale.keys():
            return f"{self.code}: false stale reads: {sorted(false)}"
        said_stale = set().union(*(self.stale[line] for line in stale))
        if missed := set().union(*self.stale.values()) - said_stale:  # at a byte, one line stands for all
            return f"{self.code}: missed stale reads of {sorted(missed)}"
        found = [one for one in found if one.defect is not DefectCode.STALE_READ]
        said = {(min(one.line, one.other_line), max(one.line, one.other_line)) for one in found}
        if false := said - races.keys():
            return f"{self.code}: false: {sorted(false)}"
        lines = {one.line for one in found}
        seen = {place for pair, places in races.items() if lines.intersection(pair) for place in places}
        missed = set().union(*races.values()) - seen
        return f"{self.code}: missed on {sorted(missed)}" if missed else ""

    def difference_of_memory(self) -> str:
        """Return which of the other checks' findings are lost, or new, by leaving out checks that look needless.

        A part of the memory can be used, and a part of that has values; it may lie in two pages.
        """
        self.load()
        pick = self.random.choice
        offset, kinds = pick((0, 0, 4096 - 256)), pick(_MEMORY)
        size = pick((4, 64, 200, 256, GLOBAL, GLOBAL + 4096))
        first = self.random.randrange(0, size)
        stop = self.random.randrange(first, size + 1) if self.random.random() < 0.5 else size
        found = []
        for everything in (False, True):
            self.load()
            start = self.memory.ctypes.data + offset
            self.params[0] = start
            shadow = jit.Shadow(start - offset, 3 * 4096, kinds)
            shadow.allocated(start, size)
            shadow.written(start + first, stop - first)
            if everything:
                self.kernel.checks.__dict__["independent"] = _Nothing()
                self.kernel.checks.__dict__["argument_ranges"] = ArgumentRanges((), {})
            defects = []
            for _ in range(2):  # the second launch finds what the first one wrote
                defects += self.kernel.launch(
                    jit.LaunchShape((self.blocks, 1, 1), (*self.block, 1)),
                    ctypes.addressof(self.params),
                    jit.LaunchOptions(shadow=shadow),
                )
            found.append(sorted((one.defect, one.line, one.address - start, one.thread, one.count) for one in defects))
        self.defects = len(found[1])
        return f"{self.code}: {found}" if found[0] != found[1] else ""


class _Nothing:
    """Of no launch is anything known."""

    def may_write(self, apart: object) -> bool:
        return True

    def leaves_nothing(self, *_: object) -> bool:
        return False

    def of_launch(self, *_: object) -> LaunchFacts:
        return LaunchFacts(frozenset(), None, (), frozenset())


def campaign(cases: int, seed: int = 0) -> list[str]:
    """Return the differences of so many launches."""
    found = ((number, Case(number).difference()) for number in range(seed, seed + cases))
    return [f"case {number}: {text}" for number, text in found if text]


if __name__ == "__main__":
    differences = campaign(*([int(argument) for argument in sys.argv[1:]] or [500]))
    print("\n".join(differences[:20]))
    print(f"{len(differences)} differences")
    sys.exit(bool(differences))
