"""Random kernels of loops that the threads of a block run together, around what they do alike and what they do not.

Their registers are of three kinds: words of the input; *scalar* ones, made of ``%tid.x`` and numbers, many of them near
where they wrap around; and wide ones, made of these. Loops count a number, go on while a scalar is below a number, or
end differently for each thread; branches are by either kind.
"""

from __future__ import annotations

from random_kernels import WORDS, Writer

__all__ = ["even_kernel"]

_EDGES = (0, 1, 5, 16, 0x7FFFFFF0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
_SMALL = (1, 2, 3, 4, 16, 0xFFFFFFFF, 0xFFFFFFFC)


class _EvenWriter(Writer):
    def __init__(
        self, seed: int, threads: int, *, by: str, has_loops: bool, has_detours: bool, has_searches: bool
    ) -> None:
        super().__init__(seed, threads)
        self.by, self.has_loops, self.has_detours, self.has_searches = by, has_loops, has_detours, has_searches
        self.scalars: list[str] = []
        self.counters: list[str] = []  # what loops around count: only read

    def begin(self) -> None:
        self.load_inputs()
        for _ in range(4):
            register = self.new(4)
            what = self.rng.randrange(3)
            if what == 0:
                self.emit(f"mov.u32 {register}, {self.rng.choice(_EDGES)};")
            elif what == 1:
                self.emit(f"add.u32 {register}, %me, {self.rng.choice(_EDGES)};")
            else:
                factor, more = self.rng.choice(_SMALL), self.rng.choice(_EDGES)
                self.emit(f"mad.lo.u32 {register}, %me, {factor}, {more};")
            self.scalars.append(register)
        self.emit("ld.param.u64 %at, [in];\nmad.wide.u32 %at, %me, 4, %at;")

    # ---- statements ----

    def word(self) -> str:
        return self.rng.choice(self.pool[4] + self.scalars + self.counters)

    def varying(self) -> None:
        result, target = self.new(4), self.rng.choice(self.pool[4])
        what = self.rng.choice(("add.u32", "sub.u32", "mul.lo.u32", "xor.b32", "and.b32", "min.u32", "max.s32", "selp"))
        if what == "selp":
            self.emit(f"selp.b32 {result}, {self.word()}, {self.word()}, {self.rng.choice(self.pool[0])};")
        else:
            self.emit(f"{what} {result}, {self.word()}, {self.word()};")
        self.emit(f"mov.b32 {target}, {result};")

    def alike(self) -> None:
        result, one, target = self.new(4), self.rng.choice(self.scalars + self.counters), self.rng.choice(self.scalars)
        number = self.rng.choice(_SMALL)
        self.emit(
            self.rng.choice(
                (
                    f"add.u32 {result}, {one}, {number};",
                    f"sub.u32 {result}, {one}, {self.rng.choice(self.scalars)};",
                    f"mul.lo.u32 {result}, {one}, {number};",
                    f"shl.b32 {result}, {one}, {self.rng.randrange(5)};",
                    f"shr.u32 {result}, {one}, {self.rng.randrange(8)};",
                    f"shr.s32 {result}, {one}, {self.rng.randrange(8)};",
                    f"div.u32 {result}, {one}, {self.rng.choice((1, 16, 64, 1000))};",
                    f"div.s32 {result}, {one}, {self.rng.choice((0, 1, 16, 1000, 0xFFFFFFFF, 0xFFFFFFC0))};",
                    f"not.b32 {result}, {one};",
                    f"neg.s32 {result}, {one};",
                )
            )
        )
        self.emit(f"mov.b32 {target}, {result};")

    def wide(self) -> None:
        result, one, target = self.new(8), self.rng.choice(self.scalars + self.counters), self.rng.choice(self.pool[8])
        number = self.rng.choice(_SMALL)
        self.emit(
            self.rng.choice(
                (
                    f"cvt.s64.s32 {result}, {one};",
                    f"cvt.u64.u32 {result}, {one};",
                    f"mul.wide.s32 {result}, {one}, {number};",
                    f"mul.wide.u32 {result}, {one}, {number};",
                    f"mad.wide.s32 {result}, {one}, {number}, {target};",
                    f"add.s64 {result}, {target}, {self.rng.choice(self.pool[8])};",
                )
            )
        )
        self.emit(f"mov.b64 {target}, {result};")

    def memory(self) -> None:
        target = self.rng.choice(self.pool[4])
        what = self.rng.randrange(4 if self.has_loops else 6)
        if what >= 4:  # narrow, and apart
            size, place, apart = self.rng.choice((1, 2)), self.new(8), self.rng.choice((1, 2, 3, 5))
            self.emit(f"mul.wide.s32 {place}, %me, {size * apart};\nld.param.u64 %in, [in];")
            self.emit(f"add.u64 {place}, {place}, %in;\nld.param.u64 %in, [in];")
            self.emit(f"ld.global.u{8 * size} {target}, [{place}+{2 * self.rng.randrange(WORDS)}];")
            self.emit(f"mad.wide.u32 %in, %me, {4 * WORDS}, %in;")
        elif what == 0:  # side by side
            self.emit(f"ld.global.u32 {target}, [%at+{4 * self.rng.randrange(WORDS)}];")
        elif what == 1:
            self.emit(f"ld.global.u32 {target}, [%in+{4 * self.rng.randrange(WORDS)}];")
        elif what == 2:
            self.emit(f"st.global.u32 [%out+{4 * (WORDS - 1)}], {self.word()};")
        else:
            self.emit(f"ld.global.u32 {target}, [%out+{4 * (WORDS - 1)}];")

    def added(self) -> None:
        self.emit(f"and.b32 %other, {self.word()}, 15;\nmul.wide.u32 %in, %other, 4;\nadd.u64 %in, %in, %counters;")
        self.emit(f"red.global.add.u32 [%in], {self.word()};\nld.param.u64 %in, [in];")
        self.emit(f"mad.wide.u32 %in, %me, {4 * WORDS}, %in;")

    def predicate(self) -> str:
        p = self.new(0)
        how = self.rng.choice(("lt", "le", "gt", "ge", "eq", "ne"))
        kind = self.rng.choice("us") if how not in ("eq", "ne") else "u"
        one = (
            self.rng.choice(self.scalars + self.counters) if self.rng.random() < 0.6 else self.rng.choice(self.pool[4])
        )
        other = self.rng.choice((str(self.rng.choice(_EDGES)), self.rng.choice(self.scalars)))
        self.emit(f"setp.{how}.{kind}32 {p}, {one}, {other};")
        return p

    def meet(self) -> None:
        """Write something that all threads do together: a barrier or, in whole warps, a shuffle."""
        if self.threads % 32 or self.rng.random() < 0.5:
            self.emit("bar.sync 0;")
            return
        source, target, result = self.word(), self.rng.choice(self.pool[4]), self.new(4)
        self.emit(f"shfl.sync.up.b32 {result}, {source}, {self.rng.randrange(32)}, 0, 0xffffffff;")
        self.emit(f"add.u32 {target}, {target}, {result};")

    def stride(self) -> str:
        """Return a register that holds the size of what loops go on by."""
        size, blocks, result = self.new(4), self.new(4), self.new(4)
        self.emit(f"mov.u32 {size}, %ntid.x;")
        if self.by == "block":
            return size
        self.emit(f"mov.u32 {blocks}, %nctaid.x;\nmul.lo.u32 {result}, {size}, {blocks};")
        return result

    def ahead(self, counter: str, step: str) -> None:
        """Write accesses that are each a stride after the one before, as a compiler that unrolls a loop does."""
        base, place, by = self.new(8), self.new(8), self.new(8)
        self.emit(f"ld.param.u64 {base}, [in];\nmad.wide.u32 {place}, {counter}, 4, {base};")
        self.emit(f"mul.wide.u32 {by}, {step}, 4;")
        for _ in range(self.rng.randrange(1, 4)):
            self.emit(f"ld.global.u32 {self.rng.choice(self.pool[4])}, [{place}];")
            for _ in range(self.rng.randrange(3)):
                self.rng.choice((self.varying, self.alike))()
            following = self.new(8)
            self.emit(f"add.s64 {following}, {place}, {by};")
            place = following
        self.emit(f"ld.global.u32 {self.rng.choice(self.pool[4])}, [{place}];")

    # ---- control ----

    def block(self, length: int, depth: int) -> None:
        known = list(self.pool[0])
        for _ in range(length):
            if self.has_detours and self.rng.random() < 0.4:
                self.detour()
            what = self.rng.random()
            if what < 0.75 or depth > 1:
                step = self.rng.choices(
                    (self.varying, self.alike, self.wide, self.memory, self.added), (6, 4, 3, 3, 0.3)
                )[0]
                step()
            elif what < 0.87:
                self.branch(depth)
            else:
                self.loop(depth)
        self.pool[0] = known

    def branch(self, depth: int) -> None:
        other, end = self.label(), self.label()
        self.emit(f"@!{self.predicate()} bra {other};")
        self.block(self.rng.randrange(1, 4), depth + 1)
        self.emit(f"bra {end};\n{other}:")
        if self.rng.random() < 0.5:
            self.block(self.rng.randrange(1, 4), depth + 1)
        self.emit(f"{end}:")

    def detour(self) -> None:
        """Write code that only computes and that some threads pass by, or all do."""
        end, inside = self.label(), self.label()
        self.emit(f"@{self.predicate()} bra {end};")
        for _ in range(self.rng.randrange(2, 5)):
            self.rng.choice((self.varying, self.varying, self.alike, self.wide))()
        if self.rng.random() < 0.5:
            self.emit(f"@{self.predicate()} bra {inside};")
            self.varying()
            if self.rng.random() < 0.5:
                self.emit(f"@{self.predicate()} bra {end};")
            self.emit(f"{inside}:")
            self.varying()
        self.emit(f"{end}:")

    def loop(self, depth: int) -> None:
        if not self.has_loops or (self.by and depth):
            return self.branch(depth)
        if self.has_searches and self.rng.random() < 0.6:
            return self.search()
        top, out, counter, more = self.label(), self.label(), self.new(4), self.new(0)
        what = 3 if self.by else self.rng.randrange(5)
        if what < 3:  # as often for all threads
            self.emit(f"mov.u32 {counter}, {self.rng.randrange(1, 5)};\n{top}:")
            end = f"sub.u32 {counter}, {counter}, 1;\nsetp.ne.s32 {more}, {counter}, 0;\n@{more} bra {top};"
        elif what == 3:  # from its own index on, as far as for all
            step = self.stride() if self.by else self.rng.choice((16, 20, 32))
            bound = self.rng.randrange(3 * self.threads)
            kind = self.rng.choice("us")
            leave = f"setp.ge.{kind}32 {more}, {counter}, {bound};\n@{more} bra {out};"
            end = f"add.s32 {counter}, {counter}, {step};\n"
            self.emit(f"add.u32 {counter}, %me, {self.rng.randrange(3)};")
            if self.rng.random() < 0.5:
                self.emit(f"{top}:\n{leave}")
                end += f"bra {top};"
            else:  # as a compiler has it: asked once before the loop, and at its end
                self.emit(f"{leave}\n{top}:")
                end += f"setp.lt.{kind}32 {more}, {counter}, {bound};\n@{more} bra {top};"
        else:
            self.emit(f"and.b32 {counter}, {self.word()}, 7;\n{top}:")
            if self.rng.random() < 0.6:  # it only computes
                return self.computing(top, out, counter, more)
            end = f"sub.u32 {counter}, {counter}, 1;\nsetp.gt.s32 {more}, {counter}, 0;\n@{more} bra {top};"
        self.counters.append(counter)
        if self.by:
            self.memory()
            if self.rng.random() < 0.6:
                self.ahead(counter, step)
        self.block(self.rng.randrange(1, 5), depth + 1)
        self.counters.remove(counter)
        if depth == 0 and what < 3 and self.rng.random() < 0.3:
            self.meet()
        self.emit(f"{end}\n{out}:")

    def computing(self, top: str, out: str, counter: str, more: str) -> None:
        """Write the rest of a loop that does nothing but compute, and that threads may leave in two ways."""
        for _ in range(self.rng.randrange(1, 4)):
            self.rng.choice((self.varying, self.varying, self.alike, self.wide))()
            if self.rng.random() < 0.3:
                self.emit(f"@{self.predicate()} bra {out};")
            if self.rng.random() < 0.3:
                skip = self.label()
                self.emit(f"@{self.predicate()} bra {skip};")
                self.varying()
                self.emit(f"{skip}:")
        self.emit(f"sub.u32 {counter}, {counter}, 1;\nsetp.gt.s32 {more}, {counter}, 0;\n@{more} bra {top};\n{out}:")

    def search(self) -> None:
        """Write a loop over a table that is alike for all threads, which each leaves where it finds something."""
        top, out, index, more = self.label(), self.label(), self.new(4), self.new(0)
        table, place, found = self.new(8), self.new(8), self.new(4)
        is_alike = self.rng.random() < 0.8
        keeps = self.rng.random() < 0.5  # something else than the counter, from round to round
        self.emit(f"ld.param.u64 {table}, [in];")
        self.emit(f"mov.u32 {index}, {self.rng.randrange(4)};" if is_alike else f"and.b32 {index}, {self.word()}, 3;")
        self.emit(f"{top}:\nmad.wide.u32 {place}, {index}, 4, {table};\nld.global.u32 {found}, [{place}];")
        self.counters += [index, found]
        for _ in range(self.rng.randrange(1, 3)):
            p = self.new(0)
            self.emit(f"xor.b32 %other, {found}, {self.word()};\nand.b32 %other, %other, 7;")
            self.emit(f"setp.{self.rng.choice(('eq', 'lt'))}.u32 {p}, %other, {self.rng.randrange(1, 3)};")
            self.emit(f"@{p} bra {out};")
            if keeps:
                self.rng.choice((self.varying, self.alike, self.wide))()
        self.counters.remove(found)
        self.counters.remove(index)
        self.emit(f"add.u32 {index}, {index}, 1;\nsetp.lt.u32 {more}, {index}, {self.rng.randrange(1, WORDS)};")
        self.emit(f"@{more} bra {top};\n{out}:")
        if self.rng.random() < 0.7:  # where each has left it
            self.emit(f"add.u32 {self.rng.choice(self.pool[4])}, {index}, {found};")


def even_kernel(
    seed: int,
    threads: int,
    *,
    by: str = "",
    has_loops: bool = True,
    has_detours: bool = False,
    has_searches: bool = False,
) -> str:
    """Return a kernel ``k(in, out, counters)`` for one block of so many threads.

    `by` names what its loops go on by the size of, ``"grid"`` or ``"block"``. Where it has no loops, it has branches
    instead. With detours it has code that threads may pass by, with searches loops over a table.
    """
    writer = _EvenWriter(seed, threads, by=by, has_loops=has_loops, has_detours=has_detours, has_searches=has_searches)
    writer.begin()
    for _ in range(writer.rng.randrange(1, 3)):
        writer.loop(0)
        writer.block(1, 1)
        if has_loops and writer.rng.random() < 0.7:
            writer.meet()
    words = writer.pool[4][:6] + writer.scalars
    writer.store([*words, *writer.pool[8][: (WORDS - 1 - len(words)) // 2]])
    return writer.kernel("k")
