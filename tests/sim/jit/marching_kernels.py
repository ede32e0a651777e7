"""Random kernels whose threads exchange words in shared memory, in loops and branches that all of a block take alike.

Their registers are of three kinds: words of each thread; *uniform* ones, made of numbers and counters of loops; and
what is asked of both, ``threadIdx.x < k``, which is used before barriers and after them, while k goes on. Some kernels
have branches on a thread's own words around their barriers.
"""

from __future__ import annotations

from random_kernels import WORDS, Writer

__all__ = ["marching_kernel"]

_COMPARISONS = ("lt.u32", "le.u32", "gt.u32", "ge.u32", "lt.s32", "le.s32", "gt.s32", "ge.s32", "eq.s32", "ne.s32")
_EDGES = (0, 1, 15, 16, 17, 31, 100, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


class _MarchingWriter(Writer):
    def __init__(self, seed: int, threads: int, *, has_questions: bool) -> None:
        super().__init__(seed, threads)
        self.has_questions = has_questions
        self.uniform: list[str] = []
        self.counters: list[str] = []  # what loops around count: only read

    def begin(self) -> None:
        self.load_inputs()
        for _ in range(4):
            self.uniform.append(self.new(4))
            self.emit(f"mov.u32 {self.uniform[-1]}, {self.number()};")
        self.emit("mov.u32 %shared_at, shared_k;\nmad.lo.u32 %shared_at, %me, 4, %shared_at;")
        self.emit("st.shared.u32 [%shared_at], %me;")

    def number(self) -> int:
        return self.rng.choice((*_EDGES, self.threads, self.threads - 1, self.rng.randrange(self.threads)))

    def alike(self) -> str:
        return self.rng.choice(self.uniform + self.counters)

    def own(self) -> str:
        return self.rng.choice(self.pool[4][:6])

    def word(self) -> str:
        return self.rng.choice([self.own(), self.own(), self.alike(), "%me"])

    # ---- statements ----

    def varying(self) -> None:
        result = self.new(4)
        what = self.rng.choice(("add.u32", "sub.u32", "mul.lo.u32", "xor.b32", "min.u32", "max.s32"))
        self.emit(f"{what} {result}, {self.word()}, {self.word()};\nmov.b32 {self.own()}, {result};")

    def steps(self) -> None:
        """Write what changes a uniform register."""
        result, number = self.new(4), self.number()
        what = self.rng.choice(("add.u32", "sub.u32", "xor.b32", "min.u32", "and.b32"))
        self.emit(f"{what} {result}, {self.alike()}, {self.rng.choice((str(number), self.alike()))};")
        self.emit(f"mov.b32 {self.rng.choice(self.uniform)}, {result};")

    def asks(self) -> str:
        """Write a comparison of a thread's index, or of a word, with what is uniform; most are of some first threads."""
        p, how = self.new(0), self.rng.choice(_COMPARISONS)
        left, right = self.rng.choice(("%me", "%me", "%me", self.own())), self.alike()
        if self.rng.random() < 0.2:
            right = str(self.number())
        if self.rng.random() < 0.2:
            left, right = (right, left) if right[0] == "%" else (left, right)
        self.emit(f"setp.{how} {p}, {left}, {right};")
        return p

    def derives(self) -> None:
        """Write what depends on a thread's index and what is uniform, to be used later."""
        result = self.new(4)
        what = self.rng.choice(("add.u32", "sub.u32", "mul.lo.u32", "xor.b32"))
        self.emit(f"{what} {result}, %me, {self.alike()};")
        self.pool[4].append(result)

    def outlasts(self) -> None:
        """Write what is made of a uniform register in steps, and used after a barrier before which that changes."""
        source, result = self.rng.choice(self.uniform), "%me"
        for operand in (source, *self.rng.sample(["3", self.alike(), "7"], self.rng.randrange(1, 4))):
            before, result = result, self.new(4)
            self.emit(f"{self.rng.choice(('add.u32', 'xor.b32', 'mul.lo.u32'))} {result}, {before}, {operand};")
        target = self.own()
        self.emit(f"add.u32 {source}, {source}, {self.number()};\nbar.sync 0;\nadd.u32 {target}, {target}, {result};")

    def uses(self) -> None:
        if len(self.pool[4]) > WORDS // 2:
            target = self.own()
            self.emit(f"add.u32 {target}, {target}, {self.rng.choice(self.pool[4][WORDS // 2 :])};")

    def some(self) -> None:
        """Write what the threads do for which something holds, as a branch or with guards."""
        p, skip = self.asks(), self.label()
        self.emit(f"@{self.rng.choice(('', '!'))}{p} bra {skip};")
        for _ in range(self.rng.randrange(1, 3)):
            self.varying()
        self.emit(f"{skip}:")

    def exchange(self) -> None:
        """Write what reads a neighbor's word before a barrier and what writes this thread's after it, of some threads."""
        p, target, place, way = self.asks(), self.new(4), self.new(4), self.rng.choice(("", "!"))
        step = self.rng.choice((1, 2, self.threads - 1))
        self.emit("bar.sync 0;")
        beyond, around = self.new(0), self.new(4)
        self.emit(f"add.u32 {place}, %me, {step};\nsub.u32 {around}, {place}, {self.threads};")
        self.emit(f"setp.ge.u32 {beyond}, {place}, {self.threads};\nselp.u32 {place}, {around}, {place}, {beyond};")
        self.emit(f"mad.lo.u32 {place}, {place}, 4, %other;")
        skip, end = self.label(), self.label()
        kept = self.rng.random() < 0.5
        self.emit(f"mov.u32 {target}, {self.number()};\n@{way}{p} bra {skip};")
        self.emit(f"ld.shared.u32 {target}, [{place}];\nadd.u32 {target}, {target}, {self.word()};\n{skip}:")
        if self.rng.random() < 0.4:
            self.steps()
        self.emit("bar.sync 0;")
        if self.rng.random() < 0.4:
            self.steps()
        self.emit(f"@{way}{p} bra {end};\nst.shared.u32 [%shared_at], {target};")
        if self.rng.random() < 0.5:
            self.varying()
        self.emit(f"{end}:\nbar.sync 0;")
        if kept:
            self.emit(f"xor.b32 {self.own()}, {self.own()}, {target};")

    def shuffled(self) -> None:
        result = self.new(4)
        self.emit(f"shfl.sync.bfly.b32 {result}, {self.word()}, {self.rng.randrange(32)}, 31, 0xffffffff;")
        self.emit(f"add.u32 {self.own()}, {self.own()}, {result};")

    def question(self) -> None:
        """Write what few threads do, because of what they have loaded: a search, or a loop."""
        skip, p, mine, other, base = self.label(), self.new(0), self.new(4), self.new(4), self.new(8)
        # Word 0 of the block's first thread is alike for all.
        self.emit(f"bar.sync 0;\nld.param.u64 {base}, [in];\nld.global.u32 {other}, [{base}];")
        self.emit(f"ld.{self.rng.choice(('shared.u32 {}, [%shared_at]', 'global.u32 {}, [%in+4]')).format(mine)};")
        if self.rng.random() < 0.5:
            self.emit(f"and.b32 {mine}, {mine}, 63;\nand.b32 {other}, {other}, 63;")
        self.emit(f"setp.{self.rng.choice(('eq', 'ne', 'lt', 'gt'))}.u32 {p}, {mine}, {other};\n@!{p} bra {skip};")
        if self.rng.random() < 0.5:
            more, limit = self.new(4), self.new(0)
            self.emit(f"ld.global.u32 {more}, [%in+8];\nsetp.lt.u32 {limit}, {more}, {self.number()};")
            self.emit(f"@{limit} bra {skip};")
        if self.rng.random() < 0.5:
            place = self.new(8)
            self.emit(f"ld.param.u64 {place}, [counters];")
            self.emit(f"st.global.u32 [{place}+{4 * self.rng.randrange(WORDS)}], {self.rng.choice((mine, '%me'))};")
        else:
            top, left, again = self.label(), self.new(4), self.new(0)
            self.emit(f"mov.u32 {left}, {self.rng.randrange(1, 4)};\n{top}:\nadd.u32 {mine}, {mine}, {left};")
            self.emit(f"st.shared.u32 [%shared_at], {mine};\nsub.u32 {left}, {left}, 1;")
            self.emit(f"setp.ne.u32 {again}, {left}, 0;\n@{again} bra {top};")
        self.emit(f"{skip}:\nbar.sync 0;")

    # ---- control ----

    def block(self, length: int, depth: int) -> None:
        known = list(self.pool[4])
        for _ in range(length):
            what = self.rng.random()
            if self.has_questions and self.rng.random() < 0.4:
                self.question()
            elif what < 0.5 or depth > 1:
                self.rng.choice((self.varying, self.steps, self.derives, self.uses, self.some))()
            elif what < 0.72:
                self.exchange()
            elif what < 0.75:
                self.outlasts()
            elif what < 0.8 and self.threads % 32 == 0:
                self.shuffled()
            elif what < 0.9:
                self.branch(depth)
            else:
                self.loop(depth)
        self.pool[4] = known

    def branch(self, depth: int) -> None:
        p, other = self.new(0), self.label()
        self.emit(f"setp.{self.rng.choice(_COMPARISONS)} {p}, {self.alike()}, {self.rng.choice((self.alike(), '5'))};")
        self.emit(f"@{p} bra {other};")
        self.block(self.rng.randrange(1, 3), depth + 1)
        self.emit(f"{other}:")

    def loop(self, depth: int) -> None:
        top, out, counter, more = self.label(), self.label(), self.new(4), self.new(0)
        first, step = self.rng.choice(((self.rng.randrange(1, 5), 1), (self.threads // 2, 0), (2 * self.threads, 37)))
        self.emit(f"mov.u32 {counter}, {first};\n{top}:")
        self.counters.append(counter)
        self.block(self.rng.randrange(1, 4), depth + 1)
        self.counters.remove(counter)
        self.emit(f"sub.s32 {counter}, {counter}, {step};" if step else f"shr.u32 {counter}, {counter}, 1;")
        self.emit(f"setp.gt.s32 {more}, {counter}, 0;\n@{more} bra {top};\n{out}:")


def marching_kernel(seed: int, threads: int, *, has_questions: bool = False) -> str:
    """Return a kernel ``k(in, out, counters)`` for one block of so many threads."""
    writer = _MarchingWriter(seed, threads, has_questions=has_questions)
    writer.begin()
    writer.emit("mov.u32 %other, shared_k;")
    for _ in range(writer.rng.randrange(1, 3)):
        writer.block(writer.rng.randrange(1, 3), 0)
        writer.loop(0)
    writer.emit("bar.sync 0;")
    last = writer.new(4)
    writer.emit(f"ld.shared.u32 {last}, [%shared_at];")
    writer.store([*writer.pool[4][: WORDS // 2], *writer.uniform, last])
    return writer.kernel("k")
