"""Racecheck against the axioms of PTX's memory model: random kernels, and what their own runs say of each read.

    python tests/sim/jit/causality_oracle.py [CASES] [SEED]

Each kernel has up to three blocks of two threads that load and store, update, fence and meet at barriers. Every write
has a bit of its own, so that a value says which write it is of. From that follow observation order, synchronization and
causality order as the PTX ISA defines them ("Memory Consistency Model", Relations), by brute force over all pairs. Left
out is Fence-SC order: fences that nothing else orders may come in either.

Racecheck knows one more rule, which is checked, too: what threads of a block that meet at a barrier have fenced counts for
each of them (:mod:`cudatool.sim.jit.races`). By the axioms alone there are more races: those that it reports are among
them.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cudatool.sim import jit
from cudatool.sim.jit import Instrument

_HEAD = """.version 8.3
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) {
.reg .b64 %a; .reg .b32 %v, %b, %t, %one; .reg .pred %p;
ld.param.u64 %a, [p]; mov.u32 %b, %ctaid.x; mov.u32 %t, %tid.x; shl.b32 %b, %b, 8; or.b32 %one, %b, %t;
"""
_DATA, _FLAGS = (0, 1), (2, 3)  # words
_SLOTS = 64  # offset of where reads leave what they found, bytes
_WARPS = (0, 32), (0, 1)  # the threads of a block that do something: of two warps, or of one


@dataclass(frozen=True, eq=False)
class Event:
    """What a thread does at one line: a memory operation, a fence or a barrier.

    Attributes
    ----------
    reads, writes
        The word; None if it does not. An update does both.
    strong, wide
        Whether it may take part in synchronization, and whether its scope has all blocks.
    bit
        What it writes, or adds to what it found.
    """

    block: int
    thread: int
    step: int
    line: int
    text: str
    reads: int | None = None
    writes: int | None = None
    strong: bool = False
    wide: bool = False
    acquires: bool = False
    releases: bool = False
    is_fence: bool = False
    is_barrier: bool = False
    phase: int = 0
    bit: int = 0

    @property
    def who(self) -> tuple[int, int]:
        return self.block, self.thread

    @property
    def word(self) -> int | None:
        return self.reads if self.writes is None else self.writes


def morally_strong(a: Event, b: Event) -> bool:
    """Whether two operations are: of one thread, or both strong, each with a scope that includes the other's thread."""
    return a.who == b.who or (a.strong and b.strong and (a.block == b.block or (a.wide and b.wide)))


@dataclass
class Kernel:
    """A random kernel."""

    seed: int
    events: list[Event] = field(default_factory=list)
    lines: list[str] = field(default_factory=lambda: _HEAD.splitlines())

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.blocks = self.random.choice((1, 2, 2, 2, 3))
        self.threads = self.random.choice(_WARPS)
        self.weak_flags = self.random.random() < 0.3
        for phase in range(self.random.choice((1, 2, 2, 3))):
            if phase:
                self.barrier(phase)
            for block in range(self.blocks):
                for thread in self.threads:
                    self.part(block, thread, phase)
        self.lines += ["ret;", "}"]

    def add(self, text: str, block: int, thread: int, **facts: object) -> None:
        self.lines.append(text)
        self.events.append(Event(block, thread, len(self.events), len(self.lines), text, **facts))

    def barrier(self, phase: int) -> None:
        self.lines.append("bar.sync 0;")
        for block in range(self.blocks):
            for thread in self.threads:
                line = len(self.lines)
                self.events.append(
                    Event(block, thread, len(self.events), line, "bar.sync", is_barrier=True, phase=phase)
                )

    def part(self, block: int, thread: int, phase: int) -> None:
        label = f"P{phase}_{block}_{thread}"
        self.lines += [f"setp.ne.u32 %p, %one, {block << 8 | thread};", f"@%p bra {label};"]
        for _ in range(self.random.choice((0, 1, 2, 3))):
            self.operation(block, thread)
        self.lines.append(f"{label}:")

    def operation(self, block: int, thread: int) -> None:
        pick = self.random.choice
        scope = pick(("gpu", "gpu", "gpu", "cta"))
        strong = {"strong": True, "wide": scope == "gpu"}
        kind = pick(("weak", "weak", "fence", "load", "store", "update"))
        slot, bit = _SLOTS + 4 * len(self.events), 1 << sum(one.bit > 0 for one in self.events)
        word = pick(_DATA) if kind == "weak" and not (self.weak_flags and self.random.random() < 0.4) else pick(_FLAGS)
        take = f"st.global.u32 [%a+{slot}], %v;"
        if kind == "fence":
            order = pick(("acq_rel", "sc"))
            self.add(f"fence.{order}.{scope};", block, thread, is_fence=True, acquires=True, releases=True, **strong)
        elif kind == "weak" and pick((True, False)):
            self.add(f"ld.global.u32 %v, [%a+{4 * word}];", block, thread, reads=word)
            self.lines.append(take)
        elif kind == "weak":
            self.add(f"st.global.u32 [%a+{4 * word}], {bit};", block, thread, writes=word, bit=bit)
        elif kind == "load":
            order = pick(("relaxed", "relaxed", "acquire"))
            text = f"ld.{order}.{scope}.global.u32 %v, [%a+{4 * word}];"
            self.add(text, block, thread, reads=word, acquires=order == "acquire", **strong)
            self.lines.append(take)
        elif kind == "store":
            order = pick(("relaxed", "relaxed", "release"))
            text = f"st.{order}.{scope}.global.u32 [%a+{4 * word}], {bit};"
            self.add(text, block, thread, writes=word, bit=bit, releases=order == "release", **strong)
        else:
            order = pick(("relaxed", "relaxed", "acquire", "release", "acq_rel"))
            facts = {"acquires": order in ("acquire", "acq_rel"), "releases": order in ("release", "acq_rel"), **strong}
            text = f"atom.{order}.{scope}.global.add.u32 %v, [%a+{4 * word}], {bit};"
            self.add(text, block, thread, reads=word, writes=word, bit=bit, **facts)
            self.lines.append(take)


_Node = tuple[Event, bool]


class Causality:
    """The orders of one run, of which `values` are what each event read.

    What a release pattern orders ends with its first operation; what an acquire pattern orders comes after its last one,
    which may have come to its value later.
    """

    def __init__(self, events: list[Event], values: dict[Event, int], *, shared_fences: bool) -> None:
        self.events, self.values, self.shared_fences = events, values, shared_fences
        # Each event has two nodes, its begin and its end: what synchronizes with it comes after its begin.
        self.after: dict[_Node, set[_Node]] = {(one, end): set() for one in events for end in (False, True)}
        last: dict[tuple[int, int], Event] = {}
        for one in events:
            self.after[one, False].add((one, True))
            if one.who in last:
                self.after[last[one.who], True].add((one, False))
            last[one.who] = one
        barriers = [one for one in events if one.is_barrier]
        for one in barriers:
            others = [(b, True) for b in barriers if (b.block, b.phase) == (one.block, one.phase)]
            self.after[one, False].update(others)
        self.observed = self._observation()
        for first, last_one in self._synchronizes():
            self.after[first, True].add((last_one, True))
        self.base = {one: self._reached(one) for one in events}

    def _reached(self, start: Event) -> set[Event]:
        found, pending = set[_Node](), [(start, True)]
        while pending:
            for node in self.after[pending.pop()] - found:
                found.add(node)
                pending.append(node)
        return {one for one, is_end in found if not is_end}

    def _source(self, read: Event) -> Event | None:
        """Return the write whose value a read found; None for what was there before."""
        results = {w.bit | self.values.get(w, 0): w for w in self.events if w.writes == read.reads}
        return results.get(self.values[read]) if self.values[read] else None

    def _observation(self) -> dict[Event, set[Event]]:
        """By read, the writes that precede it in observation order."""
        sources = {read: self._source(read) for read in self.values}
        direct = {r: w for r, w in sources.items() if w is not None and r.strong and w.strong and morally_strong(r, w)}
        found: dict[Event, set[Event]] = {}
        for read in self.values:
            chain, at = set[Event](), read
            while at in direct and direct[at] not in chain:
                at = direct[at]
                chain.add(at)
            found[read] = chain
        return found

    def _program_order(self, a: Event, b: Event) -> bool:
        return a.who == b.who and a.step < b.step

    def _fenced(self, a: Event, b: Event) -> bool:
        """Whether `a` comes before `b` in program order, or, if fences are shared, through one barrier and more."""
        if self._program_order(a, b):
            return True
        return self.shared_fences and any(
            self._program_order(a, one) and one.is_barrier and self._meets(one, b) for one in self.events
        )

    def _meets(self, barrier: Event, later: Event) -> bool:
        return any(
            (one.block, one.phase) == (barrier.block, barrier.phase)
            and one.is_barrier
            and self._program_order(one, later)
            for one in self.events
        )

    def _releases(self) -> Iterator[tuple[Event, Event]]:
        """Yield the first operation and the write of each release pattern."""
        for write in self.events:
            if write.writes is None or not write.strong:
                continue
            for first in self.events:
                of_word = first.releases and first.word == write.word
                if (of_word and (first is write or self._program_order(first, write))) or (
                    first.is_fence and self._fenced(first, write)
                ):
                    yield first, write

    def _acquires(self) -> Iterator[tuple[Event, Event]]:
        """Yield the read and the last operation of each acquire pattern."""
        for read in self.events:
            if read.reads is None or not read.strong:
                continue
            for last in self.events:
                of_word = last.acquires and last.word == read.word
                if (of_word and (last is read or self._program_order(read, last))) or (
                    last.is_fence and self._fenced(read, last)
                ):
                    yield read, last

    def _synchronizes(self) -> Iterator[tuple[Event, Event]]:
        acquires = list(self._acquires())
        for first, write in self._releases():
            for read, last in acquires:
                if write in self.observed[read] and morally_strong(first, last) and first is not last:
                    yield first, last

    def precedes(self, a: Event, b: Event) -> bool:
        """Causality order."""
        return b in self.base[a] or any(a in self.observed[read] and b in self.base[read] for read in self.values)

    def races(self) -> set[tuple[int, int, int]]:
        """Return the lines of each pair that races, the lower one first, and the word."""
        found = set()
        for i, a in enumerate(self.events):
            for b in self.events[:i]:
                if a.word is None or a.word != b.word or a.who == b.who or a.writes == b.writes is None:
                    continue
                if not morally_strong(a, b) and not self.precedes(a, b) and not self.precedes(b, a):
                    found.add((min(a.line, b.line), max(a.line, b.line), a.word))
        return found


class Runner:
    """Memory and maps for kernels, one after the other."""

    def __init__(self) -> None:
        whole = np.zeros(3 * 4096, np.uint8)
        first = -whole.ctypes.data % 4096
        self._whole, self._memory = whole, whole[first : first + 4096]
        self._shadow = jit.Shadow(self._memory.ctypes.data, 4096, Instrument.RACECHECK)

    def run(self, kernel: Kernel) -> tuple[dict[Event, int], set[tuple[int, int, int]]]:
        """Run a kernel; return what its events read, and the races that are reported."""
        self._memory[:] = 0
        params = ctypes.c_uint64(self._memory.ctypes.data)
        code = jit.load("\n".join(kernel.lines).encode()).kernels["k"]
        options = jit.LaunchOptions(shadow=self._shadow, optimized=False, seed=kernel.seed)
        shape = jit.LaunchShape((kernel.blocks, 1, 1), (64, 1, 1))
        found = code.launch(shape, ctypes.addressof(params), options)
        words = self._memory.view(np.uint32)
        values = {one: int(words[(_SLOTS // 4) + one.step]) for one in kernel.events if one.reads is not None}
        said = {
            (
                min(one.line, one.other_line),
                max(one.line, one.other_line),
                (one.address - self._memory.ctypes.data) // 4,
            )
            for one in found
        }
        return values, said


def difference(kernel: Kernel, values: dict[Event, int], said: set[tuple[int, int, int]]) -> str:
    """Return what racecheck says wrongly of a kernel, empty if nothing."""
    by_axioms = Causality(kernel.events, values, shared_fences=False).races()
    races = Causality(kernel.events, values, shared_fences=True).races()
    if not races <= by_axioms:
        return "a rule for fences adds races"
    if false := said - races:
        return f"false: {sorted(false)}"
    if any(one.writes in _FLAGS and not one.strong for one in kernel.events):
        return ""  # an update of what a plain store left hands on what was released before, which may hide races
    lines = {line for first, second, _ in said for line in (first, second)}
    missed = {word for _, _, word in races}  # of each word one race is reported, and each line once
    missed -= {word for first, second, word in races if lines.intersection((first, second))}
    return f"missed on words {sorted(missed)}: {sorted(races)}" if missed else ""


def campaign(cases: int, seed: int = 0) -> list[str]:
    """Return the differences of so many kernels."""
    runner, found = Runner(), []
    for number in range(seed, seed + cases):
        kernel = Kernel(number)
        if text := difference(kernel, *runner.run(kernel)):
            found.append(f"case {number}: {text}")
    return found


if __name__ == "__main__":
    from cudatool import _driver

    _driver.choose("sim")
    _driver.initialize()
    differences = campaign(*([int(argument) for argument in sys.argv[1:]] or [1000]))
    print("\n".join(differences[:20]))
    print(f"{len(differences)} differences")
    sys.exit(bool(differences))
