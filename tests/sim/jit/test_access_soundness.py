"""What kernels touch is within what their PTX was said to touch."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from cudatool.ptx import Mode, accesses_of_launch, infer_accesses, parse
from cudatool.sim import jit

HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"
ARRAY = 32768
GAP = 4096


class Arena:
    """Arrays with gaps between them, and a footprint over all."""

    def __init__(self, count: int) -> None:
        self.memory = np.zeros((count + 1) * (ARRAY + GAP), np.uint8)
        self.base = self.memory.ctypes.data
        self.starts = [self.base + GAP + i * (ARRAY + GAP) for i in range(count)]
        self.footprint = jit.Footprint(self.base, self.memory.nbytes)

    def find(self, address: int) -> tuple[int, int] | None:
        return next(((start, ARRAY) for start in self.starts if start <= address < start + ARRAY), None)

    def array(self, index: int) -> np.ndarray:
        start = self.starts[index] - self.base
        return self.memory[start : start + ARRAY].view(np.uint64)

    def touched(self) -> dict[int, Mode]:
        """Return how each array was accessed."""
        found: dict[int, Mode] = {}
        for address, size, flags in self.footprint.ranges():
            first, last = self.find(address), self.find(address + size - 1)
            assert first is not None and first == last, "the kernel left its arrays"
            index = self.starts.index(first[0])
            found[index] = found.get(index, Mode(0)) | Mode(flags)
        return found


def run(text: str, arena: Arena, values: bytes, block: int = 32):
    """Launch kernel ``k`` and return what was inferred for the launch, by array."""
    buffer = ctypes.create_string_buffer(values, len(values) + 16)
    kernel = jit.load(text.encode()).kernels["k"]
    inferred = accesses_of_launch(infer_accesses(parse(text), "k"), values, arena.find)
    kernel.launch(
        jit.LaunchShape((2, 1, 1), (block, 1, 1)),
        ctypes.addressof(buffer),
        jit.LaunchOptions(footprint=arena.footprint),
    )
    return {arena.starts.index(one.address): one.mode for one in inferred.ranges}, inferred


def words(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


FUNCTIONS = """
.func (.param .b64 r) next(.param .b64 at) { .reg .b64 %d<3>; ld.param.b64 %d1, [at]; add.s64 %d2, %d1, 8;
    st.param.b64 [r], %d2; ret; }
.func (.param .b64 r) pick(.param .b64 a, .param .b64 b, .param .b32 which) { .reg .b64 %d<4>; .reg .b32 %r<2>; .reg .pred %p;
    ld.param.b64 %d1, [a]; ld.param.b64 %d2, [b]; ld.param.b32 %r1, [which]; setp.eq.u32 %p, %r1, 0;
    selp.b64 %d3, %d1, %d2, %p; st.param.b64 [r], %d3; ret; }
.func give(.param .b64 out, .param .b64 v) { .reg .b64 %d<3>; ld.param.b64 %d1, [out]; ld.param.b64 %d2, [v];
    st.b64 [%d1], %d2; ret; }
"""
TABLE = 7  # the array that holds pointers


class Program:
    """A random kernel that moves pointers about in every way that PTX has, and accesses what they point to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.pointers: list[str] = []
        self.registers = self.words = 0
        self.through = False
        steps = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        for i in range(4):
            self.emit(f"ld.param.u64 {self.pointer()}, [p{i}];")
        for i in range(4):
            self.emit(f"st.local.u64 [cells+{8 * i}], {self.any()}; st.shared.u64 [%mine+{8 * i}], {self.any()};")
        for _ in range(self.random.randrange(6, 16)):
            self.random.choice(steps)()
        for _ in range(self.random.randrange(1, 5)):
            self.access()

    def emit(self, text: str) -> None:
        self.lines.append(text)

    def fresh(self) -> str:
        self.registers += 1
        return f"%x{self.registers}"

    def word(self) -> str:
        self.words += 1
        return f"%w{self.words}"

    def pointer(self) -> str:
        self.pointers.append(self.fresh())
        return self.pointers[-1]

    def any(self) -> str:
        return self.random.choice(self.pointers)

    def slot(self) -> int:
        return 8 * self.random.randrange(4)

    # ---- ways of a pointer; each emits one ----

    def do_index(self) -> None:
        a = self.any()
        how = self.random.choice(["add.s64 {d}, {a}, 16;", "mad.wide.u32 {d}, %tid, 8, {a};", "sub.s64 {d}, {a}, -8;"])
        self.emit(how.format(d=self.pointer(), a=a))

    def do_choose(self) -> None:
        a, b = self.any(), self.any()
        how = self.random.choice(
            ["selp.b64 {d}, {a}, {b}, %odd;", "min.u64 {d}, {a}, {b};", "mov.u64 {d}, {a}; @%odd mov.u64 {d}, {b};"]
        )
        self.emit(how.format(d=self.pointer(), a=a, b=b))

    def do_halves(self) -> None:
        a, lo, hi, d = self.any(), self.word(), self.word(), self.pointer()
        self.emit(f"mov.b64 {{{lo}, {hi}}}, {a}; shfl.sync.idx.b32 {lo}, {lo}, 0, 31, -1;")
        self.emit(f"shfl.sync.idx.b32 {hi}, {hi}, 0, 31, -1; mov.b64 {d}, {{{lo}, {hi}}};")

    def do_field(self) -> None:
        self.emit(f"ld.param.u64 {self.pointer()}, [s+{8 * self.random.randrange(3)}];")

    def do_field_in_halves(self) -> None:
        at, lo, hi, a, b = 8 * self.random.randrange(3), self.word(), self.word(), self.fresh(), self.fresh()
        self.emit(f"ld.param.u32 {lo}, [s+{at}]; ld.param.u32 {hi}, [s+{at + 4}]; cvt.u64.u32 {a}, {lo};")
        self.emit(f"cvt.u64.u32 {b}, {hi}; shl.b64 {b}, {b}, 32; or.b64 {self.pointer()}, {a}, {b};")

    def do_algebra(self) -> None:
        a, b, t, d = self.any(), self.any(), self.fresh(), self.pointer()
        one, other = self.random.choice([("xor.b64", "xor.b64"), ("sub.s64", "add.s64"), ("add.s64", "sub.s64")])
        self.emit(f"{one} {t}, {a}, {b}; {other} {d}, {t}, {b};")

    def do_local(self) -> None:
        a = self.any()
        store = self.random.choice(
            [f"st.local.u64 [cells+{self.slot()}]", f"st.u64 [%generic+{self.slot()}]", "st.local.u64 [%chosen]"]
        )
        self.emit(f"{store}, {a};")
        load = self.random.choice(
            [
                f"ld.local.u64 {{}}, [cells+{self.slot()}];",
                f"ld.u64 {{}}, [%generic+{self.slot()}];",
                "ld.local.u64 {}, [%chosen];",
            ]
        )
        self.emit(load.format(self.pointer()))

    def do_shared(self) -> None:
        a = self.any()
        self.emit(f"st.shared.u64 [%mine+{self.slot()}], {a};")
        load = self.random.choice(["ld.shared.u64 {d}, [%mine+{s}];", "atom.shared.exch.b64 {d}, [%mine+{s}], {a};"])
        self.emit(load.format(d=self.pointer(), s=self.slot(), a=self.any()))

    def do_call(self) -> None:
        a, b, d = self.any(), self.any(), self.pointer()
        declare = ".param .b64 a; .param .b64 b; .param .b32 c; .param .b64 v;"
        self.emit(
            self.random.choice(
                [
                    f"{{ {declare} st.param.b64 [a], {a}; call (v), next, (a); ld.param.b64 {d}, [v]; }}",
                    f"{{ {declare} st.param.b64 [a], {a}; st.param.b64 [b], {b}; st.param.b32 [c], %bit; call (v), pick, (a, b, c); ld.param.b64 {d}, [v]; }}",
                    f"{{ {declare} st.param.b64 [a], %generic; st.param.b64 [b], {a}; call give, (a, b); }} ld.local.u64 {d}, [cells];",
                ]
            )
        )

    def do_load(self) -> None:
        if self.random.random() < 0.3:
            self.through = True
            self.emit(
                f"ld.param.u64 %table, [q]; ld.global.u64 {self.pointer()}, [%table+{8 * self.random.randrange(3)}];"
            )

    def do_loop(self) -> None:
        a, d, label = self.any(), self.pointer(), f"LOOP{self.registers}"
        self.emit(f"mov.u64 {d}, {a}; mov.u32 %i, 0; {label}: add.s64 {d}, {d}, 8; add.u32 %i, %i, 1;")
        self.emit(f"setp.lt.u32 %more, %i, 3; @%more bra {label};")

    def access(self) -> None:
        how = [
            "ld.global.u32 %w, [{}];",
            "st.global.u32 [{}+4], 1;",
            "red.global.add.u32 [{}], 1;",
            "ld.u32 %w, [{}];",
            "st.u8 [{}], %w;",
        ]
        self.emit(self.random.choice(how).format(self.any()))

    @property
    def text(self) -> str:
        declared = f".reg .b64 %x<{self.registers + 1}>; .reg .b32 %w<{self.words + 1}>;"
        return f"""{HEADER}{FUNCTIONS}
.visible .entry k(.param .align 8 .b8 s[24], .param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3, .param .u64 q) {{
.reg .b32 %tid, %bit, %i, %w; .reg .pred %odd, %more; .reg .b64 %generic, %chosen, %table, %t1; .reg .b32 %mine, %t2;
.local .align 8 .b8 cells[32]; .shared .align 8 .b8 all[1024];
{declared}
mov.u32 %tid, %tid.x; and.b32 %bit, %tid, 1; setp.eq.u32 %odd, %bit, 1; mov.u32 %w, 0;
mov.u64 %t1, cells; cvta.local.u64 %generic, %t1; mad.wide.u32 %chosen, %bit, 8, %t1;
mov.u32 %t2, all; mad.lo.u32 %mine, %tid, 32, %t2;
{chr(10).join(self.lines)}
ret;
}}"""


@pytest.mark.some_of("seed", range(40), 6)
def test_random_ways_of_pointers(seed):
    program = Program(seed)
    arena = Arena(8)
    table = arena.array(TABLE)
    table[:3] = arena.starts[4:7]
    values = words(*arena.starts[4:7], *arena.starts[:4], arena.starts[TABLE])
    inferred, launch = run(program.text, arena, values)
    assert launch.unknown <= program.through, "every way but through memory is followed"
    if not launch.unknown:
        missing = {k: mode & ~inferred.get(k, Mode(0)) for k, mode in arena.touched().items()}
        assert not any(missing.values()), program.text


SOURCE = """
__device__ __noinline__ void put(float *to, const float *from, int i) { to[i] = from[i]; }
__device__ __noinline__ float *pick(float *a, float *b, bool first) { return first ? a : b; }
struct Views { const float *in; long n; float *out[2]; };
"""
R, W, A = Mode.READ, Mode.WRITE, Mode.ATOMIC
P = "float *a, float *b, float *c, float *d"
# name -> (parameters, body, what the arrays that the arguments point to are expected to be used for)
KERNELS = {
    "copies": (P, "b[threadIdx.x] = a[threadIdx.x]; c[threadIdx.x] += 1; atomicAdd(d, 1.f);", [R, W, R | W, A]),
    "calls": (P, "put(b, a, threadIdx.x); put(d, c, threadIdx.x);", [R, W, R, W]),
    "picks": (P, "*pick(a, b, threadIdx.x & 1) = 1; d[0] = c[0];", [W, W, R, W]),
    "array_of_pointers": (P, "float *all[] = {a, b, c}; for (int i = 0; i < 3; i++) all[(threadIdx.x + i) % 3][i] = d[i];", [W, W, W, R]),
    "ends": (P, "for (float *at = a, *end = a + 64; at != end; ++at) *b += *at;", [R, R | W, Mode(0), Mode(0)]),
    "backwards": (P, "for (int i = 63; i >= 0; i--) b[63 - i] = a[i];", [R, W, Mode(0), Mode(0)]),
    "distance": (P, "b[(a + 8) - a] = 1; if (a < c) d[0] = 1;", [Mode(0), W, Mode(0), W]),
    "lambda": (P, "auto f = [=](int i) { b[i] = a[i]; }; f(threadIdx.x);", [R, W, Mode(0), Mode(0)]),
    "shared_pointers": (P, "__shared__ float *p[2]; if (!threadIdx.x) { p[0] = a; p[1] = b; } __syncthreads(); p[threadIdx.x & 1][0] = c[0];", [W, W, R, Mode(0)]),
    "words": (P, "((int4 *) b)[threadIdx.x] = ((const int4 *) a)[threadIdx.x]; ((char *) c)[threadIdx.x] = 1;", [R, W, W, Mode(0)]),
    "by_value": ("Views v", "v.out[1][threadIdx.x] = v.in[threadIdx.x]; v.out[0][v.n] = 1;", [R, W, W, Mode(0)]),
    # The compiler copies the struct to local memory, where the index could reach every field.
    "by_value_indexed": ("Views v", "v.out[threadIdx.x & 1][threadIdx.x] = v.in[threadIdx.x];", [R | W, W, W, Mode(0)]),
    "strides": ("const float *a, float *b, const long *c, long d", "b[threadIdx.x * d] = a[c[threadIdx.x] * d];", [R, W, R, Mode(0)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> str:
    from cudatool.runtime.nvrtc import to_ptx

    kernels = "".join(
        f'extern "C" __global__ void {name}({params}) {{ {body} }}\n' for name, (params, body, _) in KERNELS.items()
    )
    return to_ptx(SOURCE + kernels, "kernels.cu").decode()


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_kernels(compiled, name):
    arena = Arena(4)
    a, b, c, d = arena.starts
    other = dict.fromkeys(("by_value", "by_value_indexed"), (a, 1, b, c)) | {"strides": (a, b, c, 1)}
    values = words(*other.get(name, (a, b, c, d)))
    inferred, launch = run(compiled.replace(f".entry {name}(", ".entry k("), arena, values)
    assert not launch.unknown
    measured = arena.touched()
    assert not any(mode & ~inferred.get(k, Mode(0)) for k, mode in measured.items())
    assert KERNELS[name][2] == [inferred.get(k, Mode(0)) for k in range(4)]
