"""The engine of racecheck against brute force: random threads that access and synchronize, judged by a graph of events.

    python tests/sim/jit/race_oracle.py [CASES] [SEED]

The oracle keeps every event with all events that happen before it (a set, as the bits of an integer), and compares
every pair of accesses. It knows nothing of moments, trees or histories.
"""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass, field

from cudatool.sim.host_library import library
from cudatool.sim.jit.instrument import CELL, WORD, Flag, RaceMode, run_key
from cudatool.sim.jit.race_engine import RUNS, AccessRun, EngineState, Order, RaceReason, RaceRecord, Races, Reads

_STALE, _GUESS = 3, 5  # the kinds that records of such reads have

ENDED = 0x7FFFFFFF
THREADS = 40  # of a block: a warp and a part of one
LANES = (0, 1, 2, 32, 33)  # those that do something
BLOCKS = 3
BASE = 1 << 30  # address of device memory; shared memory is at 1 << 20


@dataclass
class Access:
    """An access in the oracle."""

    event: int
    block: int
    thread: int
    space: int
    first: int
    size: int
    flags: int
    line: int


@dataclass
class Flagged:
    """What a flag releases in the oracle: events, to all blocks and to the writer's."""

    wide: set[int] = field(default_factory=set)
    narrow: set[int] = field(default_factory=set)
    block: int = -1
    thread: int = -1


class Case:
    """One random execution, told to the engine and to the oracle at once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        sizes = 16 * WORD, 16 * WORD, 16 * CELL, 64
        self.memory = [ctypes.create_string_buffer(size + 64) for size in sizes]
        words, seconds, cells, reads_of = ((ctypes.addressof(one) + 63) // 64 * 64 for one in self.memory)
        self.plain = self.random.random() < 0.4
        self.reads_mostly = self.plain and self.random.random() < 0.5
        self.copies_alone = self.random.random() < 0.25
        self.waits_for_reads = 0  # of groups that also write, which then may still happen
        self.width = self.random.choice((THREADS, 1, 2, 4, 4, 5, 8))
        self.engine = Races(
            1,
            BLOCKS,
            THREADS,
            self.width,
            64,
            4096,
            order=Order(acquires=not self.plain, plain=self.plain, programs=False),
            base=BASE,
            words=words,
            seconds=seconds,
            cells=cells,
            reads_of=reads_of,
            stamp=4 + 4 * (seed % 63),
        )
        self.reads_of = reads_of
        self.settled = 0  # reads that inlined code leaves out
        self.runs = ctypes.cast(ctypes.c_void_p.from_address(self.engine.handle).value, ctypes.POINTER(AccessRun))
        self.before: list[int] = []  # for each event, the events before it as bits
        self.last: dict[tuple[int, int], int] = {}  # of each thread: its last event, as bits with all before
        self.accesses: list[Access] = []
        self.through: list[tuple[RaceReason, int]] = []  # reads through a cache: which one, and the access' number
        self.fenced: dict[tuple[int, int], list[set[int]]] = {}
        self.gained: dict[tuple[int, int], list[set[int]]] = {}
        self.flags: dict[int, Flagged] = {}
        self.copies: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}  # event, its group, whether it reads
        self.phases = (ctypes.c_uint64 * BLOCKS)()  # an mbarrier for each block
        self.groups: dict[tuple[int, int], int] = {}
        self.line = 0
        for block in range(BLOCKS):
            if not self.plain:
                self.call("enter", ctypes.c_uint64(block), ctypes.c_uint64(1 << 20), 1)
            for thread in range(THREADS):
                key = block, thread
                self.last[key] = 0
                self.fenced[key], self.gained[key] = [set(), set()], [set(), set()]
                self.copies[key], self.groups[key] = [], 0

    def call(self, name: str, *arguments: object) -> None:
        getattr(library(), f"cudatool_race_{name}")(ctypes.c_void_p(self.engine.handle), *arguments)

    def event(self, before: int) -> int:
        self.before.append(before)
        return len(self.before) - 1

    def step(self, key: tuple[int, int], more: int = 0) -> int:
        """An event of a thread, after its last one and `more`."""
        number = self.event(self.last[key] | more)
        self.last[key] = self.before[number] | 1 << number
        return number

    def heads(self, events: set[int]) -> int:
        found = 0
        for one in events:
            found |= self.before[one] | 1 << one
        return found

    # ---- what threads do ----

    def is_settled(self, first: int, size: int, *, cached: bool = False) -> bool:
        """Whether inlined code leaves a read of device memory out (``_lacks`` of the instrumentation)."""
        stamp, ignored = EngineState.from_address(self.engine.handle).stamp & 255, 0 if cached else Reads.CACHED
        states = (ctypes.c_uint8 * size).from_address(self.reads_of + first)
        left_out = self.plain and not size % 4 and all(s | ignored == stamp | 3 for s in states)
        self.settled += left_out
        return left_out

    def access(self, key: tuple[int, int], copies: bool) -> None:
        space = self.random.randrange(2)
        size = self.random.choice((1, 2, 4, 4, 8))
        first = self.random.randrange(0, self.random.choice((4, 12, 12, 56)), size)
        mode = self.random.choice((RaceMode.READ, RaceMode.WRITE))
        guesses = mode is RaceMode.READ and self.random.random() < 0.2
        if self.reads_mostly and not copies and self.random.random() < 0.85:
            space, size, mode = 0, self.random.choice((4, 4, 8)), RaceMode.READ
            first = self.random.randrange(0, 16, size)
        flags = int(mode)
        if copies:
            flags |= Flag.ASYNC
            number = self.event(self.last[key])
            self.copies[key].append((number, self.groups[key], mode is RaceMode.READ))
        else:
            what = 1 if self.reads_mostly and mode is RaceMode.READ else self.random.random()
            if what < 0.15:
                flags = RaceMode.ATOMIC | Flag.STRONG | (Flag.WIDE if self.random.random() < 0.8 else 0)
            elif guesses:
                flags |= Flag.STRONG | Flag.WIDE | Flag.GUESS
            elif what < 0.3:
                flags |= Flag.STRONG | (Flag.WIDE if self.random.random() < 0.5 else 0)
            number = self.step(key)
        self.line += 1
        self.accesses.append(Access(number, key[0], key[1], space, first, size, int(flags), self.line))
        if flags == RaceMode.READ and not space and self.is_settled(first, size):
            return
        if flags not in (RaceMode.READ, RaceMode.WRITE) or self.random.random() < 0.3:
            self.call("access", ctypes.c_uint64(first), size, int(flags), self.line, space, key[1])
        else:
            self.step_of_run(
                self.random.choice((0, 1, 5, RUNS)), first, self.line, size, RaceMode(flags), space, key[1]
            )

    def read_through(self, key: tuple[int, int]) -> None:
        """A read through a cache that does not see what the launch writes."""
        size = self.random.choice((1, 1, 2, 4, 8, 16))
        first = self.random.randrange(0, 56 - size, size)
        if self.through and self.random.random() < 0.3:  # the line of the one before, again
            reason, line = self.through[-1][0], self.accesses[self.through[-1][1]].line
        else:
            self.line += 1
            reason, line = self.random.choice((RaceReason.READ_ONLY_CACHE, RaceReason.TEXTURE_CACHE)), self.line
        function = "cached" if reason is RaceReason.READ_ONLY_CACHE else "fetched"
        self.through.append((reason, len(self.accesses)))
        self.accesses.append(Access(self.step(key), key[0], key[1], 0, first, size, int(RaceMode.READ), line))
        is_cached = reason is RaceReason.READ_ONLY_CACHE
        if is_cached and self.is_settled(first, size, cached=True):
            return
        if self.random.random() < 0.5:
            self.call("access", ctypes.c_uint64(first), size, int(RaceMode.READ), line, 0, key[1])
        else:
            self.step_of_run(self.random.choice((0, 1, 5, RUNS)), first, line, size, RaceMode.READ, 0, key[1])
        self.call(function, ctypes.c_uint64(first), size, line, key[1])
        if size == 4 and self.random.random() < 0.3:  # and then the thread updates it
            self.line += 1
            flags = int(RaceMode.ATOMIC | Flag.STRONG | Flag.WIDE)
            self.accesses.append(Access(self.step(key), key[0], key[1], 0, first, size, flags, self.line))
            self.call("access", ctypes.c_uint64(first), size, flags, self.line, 0, key[1])

    def step_of_run(
        self, number: int, offset: int, line: int, size: int, mode: RaceMode, space: int, thread: int
    ) -> None:
        """What inlined code does for an access (``race_step``)."""
        run, this = self.runs[number], run_key(line, size, mode, space) << 32 | thread
        if (run.next, run.expected) == (offset, this):
            run.next = (run.next + run.stride) % (1 << 64)
            run.expected += 1
        else:
            self.call("open", number, ctypes.c_uint64(offset), ctypes.c_uint64(this))

    def sweep(self, block: int) -> None:
        """Threads one after the other make the same accesses, at constant distances, in rows or not."""
        start, count = self.random.choice(((0, 3), (0, 9), (0, 12), (1, 8), (8, 20), (30, 4), (31, 3), (32, 2)))
        rows = self.width if 1 < self.width < count and self.random.random() < 0.6 else count
        steps = []
        for _ in range(self.random.randrange(1, 3)):
            size = self.random.choice((1, 2, 4, 4, 4, 8))
            stride = size * self.random.choice((0, 1, 1, 1, 2, -1))
            row_stride = (
                stride * rows if self.random.random() < 0.2 else size * self.random.choice((0, 0, 1, 2, 4, 8, -1))
            )
            places = [n // rows * row_stride + n % rows * stride for n in range(count)]
            if self.random.random() < 0.1:
                places[-1] = places[0]
            low, high = -min(places), 64 - size - max(places)
            if high >= low:
                first = self.random.randrange(low // size, high // size + 1) * size
                first = low if self.random.random() < 0.5 else first
                self.line += 1
                steps.append(
                    (self.line, size, places, first, self.random.choice((RaceMode.READ, RaceMode.READ, RaceMode.WRITE)))
                )
        space = self.random.randrange(2)
        if self.random.random() < 0.4:
            self.sweep(block)  # with nothing between: threads come back to their words, or to others'
        for n in range(count):
            for number, (line, size, places, first, mode) in enumerate(steps):
                offset = first + places[n]
                event = self.step((block, start + n))
                self.accesses.append(Access(event, block, start + n, space, offset, size, int(mode), line))
                self.step_of_run(number, offset, line, size, mode, space, start + n)

    def fence(self, key: tuple[int, int]) -> None:
        wide = self.random.randrange(2)
        more = 0
        for scope in range(wide + 1):
            more |= self.heads(self.gained[key][scope])
            self.gained[key][scope] = set()
        number = self.step(key, more)
        for scope in range(wide + 1):
            self.fenced[key][scope] = {number}
        self.call("fence", wide, key[1])

    def strong(self, key: tuple[int, int]) -> None:
        address = self.random.choice((0x5000, 0x5008))
        mode = self.random.choice((RaceMode.READ, RaceMode.WRITE, RaceMode.ATOMIC))
        wide = self.random.random() < 0.7
        acquires, releases = (self.random.random() < 0.3 for _ in range(2))
        flags = int(mode) | Flag.STRONG | (Flag.WIDE if wide else 0)
        flags |= (Flag.ACQUIRE if acquires else 0) | (Flag.RELEASE if releases else 0)
        wrote = self.random.random() < 0.8
        flag = self.flags.get(address)
        more = 0
        if mode != RaceMode.WRITE and flag is not None:
            near = flag.narrow if flag.block == key[0] else set()
            far = flag.wide if wide else set()
            if acquires:
                more = self.heads(near | far)
            else:
                self.gained[key][0] |= near
                self.gained[key][1] |= far
        number = self.step(key, more)
        self.call("strong", ctypes.c_uint64(address), int(flags), int(wrote), key[1])
        if mode == RaceMode.READ or not wrote:
            return
        near = {number} if releases else set(self.fenced[key][0])
        far = ({number} if releases else set(self.fenced[key][1])) if wide else set()
        if flag is not None and (mode == RaceMode.ATOMIC or (flag.block, flag.thread) == key):
            if flag.block == key[0]:
                near |= flag.narrow
            if wide:
                far |= flag.wide
        self.flags[address] = Flagged(far, near, *key)

    def meet(self, keys: list[tuple[int, int]], more: int = 0) -> None:
        together = more
        for key in keys:
            together |= self.last[key]
        number = self.event(together)
        fenced = [set().union(*(self.fenced[key][scope] for key in keys)) for scope in range(2)]
        gained = [set().union(*(self.gained[key][scope] for key in keys)) for scope in range(2)]
        for key in keys:
            self.last[key] = together | 1 << number
            self.fenced[key] = [set(one) for one in fenced]
            self.gained[key] = [set(one) for one in gained]

    def barrier(self, block: int) -> None:
        self.meet([(block, thread) for thread in range(THREADS)])
        self.call("barrier")

    def part(self, block: int) -> None:
        """A named barrier of some threads, at which others may have arrived."""
        some = self.random.sample(LANES, self.random.randrange(2, 5))
        arriving = some[: self.random.randrange(len(some) - 1)]
        waiting = some[len(arriving) :]
        numbers = (ctypes.c_uint32 * 1056)(*([1] * 1056))
        more = 0
        for thread in arriving:
            number = self.step((block, thread))
            more |= self.before[number] | 1 << number
            self.call("arrive", ctypes.c_uint64(thread // 32), ctypes.c_uint32(1 << thread % 32), numbers)
        let = (ctypes.c_uint32 * 32)()
        for thread in waiting:
            let[thread // 32] |= 1 << thread % 32
        for_any = self.random.random() < 0.2  # others waited, too, that the barrier could have let go
        if not for_any:
            self.meet([(block, thread) for thread in waiting], more)
        self.call("barriers", let, 1, 2 if for_any else 1, len(some))

    def warp(self, block: int) -> None:
        if self.random.random() < 0.4:
            warp = self.random.randrange(2)
            lanes = list(range(32 if not warp else THREADS - 32))
        else:
            warp, lanes = 0, self.random.sample(range(3), self.random.randrange(1, 4))
        mask = sum(1 << lane for lane in lanes)
        regions, masks = (ctypes.c_uint32 * 1056)(), (ctypes.c_uint32 * 1056)(*([mask] * 1056))
        self.meet([(block, 32 * warp + lane) for lane in lanes])
        self.call("warp", ctypes.c_uint64(warp), ctypes.c_uint32(mask), regions, masks)

    def commit(self, key: tuple[int, int]) -> None:
        self.groups[key] += 1
        self.call("commit", key[1])

    def wait(self, key: tuple[int, int], *, reads: bool) -> None:
        keep = self.random.choice((0, 1, 0xFFFFFFFF))
        until = self.groups[key] + 1 if keep == 0xFFFFFFFF else self.groups[key] - keep
        over = {is_read for _, group, is_read in self.copies[key] if group < until}
        self.waits_for_reads += reads and over == {True, False}
        done = {one for one in self.copies[key] if one[1] < until and (one[2] or not reads)}
        self.copies[key] = [one for one in self.copies[key] if one not in done]
        self.step(key, self.heads({event for event, _, _ in done}))
        self.call("wait", ctypes.c_uint32(keep), int(reads), key[1])

    def cluster(self, block: int) -> None:
        """All threads arrive at their cluster's barrier, some do more, and all wait."""
        released: set[int] = set()
        for thread in range(THREADS):
            key, relaxed = (block, thread), self.random.random() < 0.3
            released |= set(self.fenced[key][0]) if relaxed else {self.step(key)}
            self.call("cluster", int(relaxed), thread)
        for _ in range(self.random.randrange(3)):
            self.access((block, self.random.choice(LANES)), copies=False)
        self.call("cluster", 2, 0)
        for thread in range(THREADS):
            self.step((block, thread), self.heads(released))
        self.call("barrier")

    def mbarrier(self, block: int) -> None:
        """Threads complete a phase of an mbarrier, and others see that."""
        word = ctypes.c_void_p(ctypes.addressof(self.phases) + 8 * block)
        arriving = self.random.sample(LANES, self.random.randrange(1, 4))
        released: set[int] = set()
        for thread in arriving:
            key, relaxed = (block, thread), self.random.random() < 0.4
            number = self.step(key)
            released |= set(self.fenced[key][0]) if relaxed else {number}
            if thread == arriving[-1]:
                self.phases[block] ^= 1 << 63
            self.call("mbarrier", word, 4 if relaxed else 1, thread)
        for thread in self.random.sample(LANES, self.random.randrange(3)):
            key, relaxed = (block, thread), self.random.random() < 0.4
            self.step(key, 0 if relaxed else self.heads(released))
            if relaxed:
                self.gained[key][0] |= released
            self.call("passed", word, 1, int(relaxed), thread)

    # ---- verdicts ----

    def run(self) -> None:
        if self.plain:
            self.run_plain()
            return
        if self.copies_alone:
            self.run_copies()
            return
        uses_copies = self.random.random() < 0.4
        for _ in range(self.random.randrange(5, 45)):
            block = self.random.randrange(BLOCKS)
            key = block, self.random.choice(LANES)
            self.call("enter", ctypes.c_uint64(block), ctypes.c_uint64(1 << 20), 0)
            what = self.random.random()
            if what < 0.15:
                self.sweep(block)
            elif what < 0.45:
                self.access(key, uses_copies and self.random.random() < 0.4)
            elif what < 0.48:
                self.read_through(key)
            elif what < 0.6:
                self.strong(key)
            elif what < 0.72:
                self.fence(key)
            elif what < 0.76:
                self.barrier(block)
            elif what < 0.78:
                self.cluster(block)
            elif what < 0.82:
                self.part(block)
            elif what < 0.86:
                self.mbarrier(block)
            elif what < 0.92:
                self.warp(block)
            elif uses_copies:
                if self.random.random() < 0.5:
                    self.commit(key)
                else:
                    self.wait(key, reads=self.random.random() < 0.3)

    def run_copies(self) -> None:
        """A kernel of asynchronous copies: each reads a source and fills a target, and threads wait for either."""
        keys = [(self.random.randrange(2), thread) for thread in self.random.sample(LANES, self.random.randrange(1, 4))]
        for _ in range(self.random.randrange(6, 40)):
            key = self.random.choice(keys)
            self.call("enter", ctypes.c_uint64(key[0]), ctypes.c_uint64(1 << 20), 0)
            what = self.random.random()
            if what < 0.3:
                for _ in range(self.random.randrange(1, 4)):
                    self.access(key, copies=True)
                if self.random.random() < 0.8:
                    self.commit(key)
            elif what < 0.6:
                self.wait(key, reads=self.random.random() < 0.7)
            elif what < 0.9:
                self.access(key, copies=False)
            else:
                self.barrier(key[0])

    def run_plain(self) -> None:
        """A kernel that has no order but barriers: each block runs to its end before the next one begins."""
        for block in range(BLOCKS):
            self.call("enter", ctypes.c_uint64(block), ctypes.c_uint64(1 << 20), 1)
            for _ in range(self.random.randrange(20, 60) if self.reads_mostly else self.random.randrange(2, 15)):
                what = 0.5 if self.reads_mostly and self.random.random() < 0.8 else self.random.random()
                if what < 0.3:
                    self.sweep(block)
                elif what < 0.65:
                    self.access((block, self.random.choice(LANES)), copies=False)
                elif what < 0.75:
                    self.read_through((block, self.random.choice(LANES)))
                else:
                    self.barrier(block)
            self.call("leave")

    def races(self) -> dict[tuple[int, int], set[tuple[int, int]]]:
        """Return the pairs of lines that race, by definition, and on which bytes. Neither line is the second."""
        found: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for i, new in enumerate(self.accesses):
            for old in self.accesses[:i]:
                if old.space != new.space or (old.space and old.block != new.block):
                    continue
                if not (old.flags | new.flags) & RaceMode.WRITE or self.before[new.event] >> old.event & 1:
                    continue
                both = old.flags & new.flags
                if both & Flag.STRONG and (old.block == new.block or both & Flag.WIDE):
                    continue
                common = range(max(old.first, new.first), min(old.first + old.size, new.first + new.size))
                if common:
                    place = new.block if new.space else -1
                    pair = min(old.line, new.line), max(old.line, new.line)
                    found.setdefault(pair, set()).update((place, byte) for byte in common)
        return found

    def guesses(self) -> set[int]:
        """Return the lines of plain reads, for ``atomicCAS`` alone, that race with a strong write."""
        return {
            read.line
            for read in self.accesses
            for write in self.accesses
            if read.flags & Flag.GUESS
            and write.flags & RaceMode.WRITE
            and write.flags & Flag.STRONG
            and (write.block == read.block or (write.flags & Flag.WIDE and not read.space))
            and write.space == read.space
            and max(read.first, write.first) < min(read.first + read.size, write.first + write.size)
            and not (self.before[read.event] >> write.event | self.before[write.event] >> read.event) & 1
            and (write.block, write.thread) != (read.block, read.thread)
        }

    def stale(self) -> dict[int, set[tuple[int, int, int, int]]]:
        """Return the reads through caches that may find old bytes: for each line, the reader and writer of such a byte.

        Of those through the read-only cache, the first ones of each byte, as others are like them.
        """
        found: dict[int, set[tuple[int, int, int, int]]] = {}
        seen: set[int] = set()
        for reason, number in self.through:
            read = self.accesses[number]
            own = set(range(read.first, read.first + read.size))
            if reason is RaceReason.READ_ONLY_CACHE:
                own, seen = own - seen, seen | own
            for write in self.accesses[: number if reason is RaceReason.TEXTURE_CACHE else None]:
                written = range(write.first, write.first + write.size)
                if not write.space and write.flags & RaceMode.WRITE and own.intersection(written):
                    found.setdefault(read.line, set()).add((read.block, read.thread, write.block, write.thread))
        return found

    def difference_of_stale(self, records: list[RaceRecord]) -> str:
        """Return what the engine says wrongly of reads through caches."""
        stale = self.stale()
        said = {r.line: (r.block, r.thread, r.other_block, r.other_thread) for r in records}
        if said.keys() != stale.keys():
            return f"stale reads at {sorted(said)}, not {sorted(stale)}"
        wrong = sorted(line for line, who in said.items() if who not in stale[line])
        return f"stale reads of others at {wrong}" if wrong else ""

    def difference_of_guesses(self, said: set[int]) -> str:
        """Return what the engine says wrongly of guesses. It may be silent where a weak write races, too."""
        guesses = self.guesses()
        raced = set().union(*self.races().values())
        missed = {
            access.line
            for access in self.accesses
            if access.line in guesses - said
            and raced.isdisjoint(
                (access.block if access.space else -1, byte) for byte in range(access.first, access.first + access.size)
            )
        }
        return f"guesses at {sorted(said)}, not {sorted(guesses)}" if missed or said - guesses else ""

    def difference(self) -> str:
        """Return what the engine says wrongly, empty if nothing."""
        self.run()
        _, records, whole = self.engine.end()
        assert whole
        if wrong := self.difference_of_stale([record for record in records if record.kind == _STALE]):
            return wrong
        guesses = {line for r in records if r.kind == _GUESS for line in (r.line, r.other_line)}
        guesses &= {access.line for access in self.accesses if access.flags & Flag.GUESS}
        if wrong := self.difference_of_guesses(guesses):
            return wrong
        records = [record for record in records if record.kind not in (_STALE, _GUESS)]
        said = {(min(r.other_line, r.line), max(r.other_line, r.line)) for r in records}
        races = self.races()
        if false := said - races.keys():
            return f"false: {sorted(false)}"
        bytes_ = set().union(*races.values())
        lines = {record.line for record in records}  # a race on another byte at a reported line is counted there
        seen = {place for pair, places in races.items() if lines.intersection(pair) for place in places}
        if missed := bytes_ - seen:
            return f"missed on bytes {sorted(missed)}"
        return ""


def campaign(cases: int, seed: int = 0) -> list[str]:
    """Return the differences of so many cases."""
    found = ((number, Case(number).difference()) for number in range(seed, seed + cases))
    return [f"case {number}: {text}" for number, text in found if text]


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    differences = campaign(*(arguments or [10_000]))
    print("\n".join(differences[:20]))
    print(f"{len(differences)} differences")
    sys.exit(bool(differences))
