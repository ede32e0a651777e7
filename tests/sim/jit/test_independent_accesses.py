"""Accesses that racecheck leaves out: only what cannot race, and what the usual kernels consist of."""

from __future__ import annotations

import ctypes
import random
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from affine_kernels import Case, campaign

from cudatool.ptx.forms import Form, may_meet
from cudatool.sim import jit
from cudatool.sim.jit import Instrument


def form(constant: int, *coefficients: int, extents: tuple[int, ...]) -> Form:
    reach = [c * (extent - 1) for c, extent in zip(coefficients, extents, strict=True)]
    low = constant + sum(one for one in reach if one < 0)
    return Form(constant, coefficients, low, constant + sum(one for one in reach if one > 0))


def test_accesses_meet_if_brute_force_finds_a_common_byte_of_two_threads():
    """Only of unlike coefficients may it be said that accesses meet which do not."""
    rng, verdicts = random.Random(0), set()
    for _ in range(3000):
        extents = tuple(rng.choice((1, 2, 3, 5)) for _ in range(3))
        widths = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4, 8))
        coefficients = [tuple(rng.choice((0, 1, 2, 4, 8, 12, 16, 20, 64, -4, -8, -16)) for _ in range(3))] * 2
        if rng.random() < 0.2:
            coefficients[1] = tuple(rng.choice((0, 4, 8, -8)) for _ in range(3))
        a, b = (form(rng.randrange(0, 40), *own, extents=extents) for own in coefficients)
        threads = [*product(*map(range, extents))]
        places = [
            [
                one.constant + sum(c * index for c, index in zip(one.coefficients, thread, strict=True))
                for thread in threads
            ]
            for one in (a, b)
        ]
        meet = any(
            places[0][i] < places[1][j] + widths[1] and places[1][j] < places[0][i] + widths[0]
            for i, j in product(range(len(threads)), repeat=2)
            if i != j
        )
        said = may_meet(a, widths[0], b, widths[1], extents)
        if coefficients[0] == coefficients[1]:
            assert meet == said, (a, b, widths, extents)
        else:
            assert said or not meet, (a, b, widths, extents)
        verdicts.add((meet, said))
    assert {(True, True), (False, False)} <= verdicts


@pytest.mark.parametrize(
    ("stride", "width", "distance", "expected"),
    [
        (4, 4, 0, False),  # each thread its own word
        (3, 4, 0, True),  # the last byte is the next thread's first one
        (-4, 4, 0, False),
        (8, 4, 4, False),  # two that interleave
        (8, 4, 3, False),  # a thread's own two accesses overlap
        (8, 4, 5, True),  # by one byte with the next thread's
        (8, 8, 1 << 20, False),
        (0, 4, 0, True),
    ],
)
def test_accesses_that_touch_by_a_byte_meet_and_those_that_interleave_do_not(stride, width, distance, expected):
    extents = (32, 1, 1, 1, 1, 1)
    a, b = (form(start, stride, 0, 0, 0, 0, 0, extents=extents) for start in (1 << 12, (1 << 12) + distance))
    assert expected == may_meet(a, width, b, width, extents)
    assert expected == may_meet(b, width, a, width, extents)


def test_no_access_that_races_is_left_out_or_lies_elsewhere():
    cases = [Case(number) for number in range(150)]
    assert [] == [text for case in cases if (text := case.wrong())]
    left_out = [len(case.independent()) / max(len(case.accesses), 1) for case in cases]
    assert {0, 1} <= set(left_out)
    assert 20 < sum(0 < part < 1 for part in left_out)
    assert 40 < sum(bool(case.races()) for case in cases)
    assert 5 < sum(bool(case.stale) for case in cases)


def test_checks_that_are_left_out_would_find_nothing():
    cases = [Case(number) for number in range(12)]
    assert [] == [text for case in cases if (text := case.difference_of_memory())]
    assert {True, False} == {bool(case.defects) for case in cases}


def test_random_kernels_are_judged_as_brute_force_judges_them():
    assert [] == campaign(10)


@pytest.fixture(scope="module")
def kernels(ptx_of):
    folder = Path(__file__).parents[3] / "benchmarks"
    return jit.load(
        ptx_of("".join((folder / name).read_text() for name in ("kernels.cu", "checked_kernels.cu")))
    ).kernels


def part_left_out(
    kernel: jit.Kernel, shapes: str, *arguments: int, grid: tuple[int, ...], block: tuple[int, ...]
) -> float:
    """Return which part of a kernel's accesses racecheck leaves out; `shapes` are those of the arguments."""
    known = kernel.checks.independent
    lines = known.of_launch(struct.pack(shapes, *arguments), grid, block, range(A, 4 * A), kernel.text.address_of).lines
    return sum(site.line in lines for site in known._sites) / len(known._sites)


A, B, C = 1 << 32, 2 << 32, 3 << 32


def test_of_kernels_that_compute_addresses_from_indices_nothing_is_looked_at(kernels):
    square = {"grid": (8, 32, 1), "block": (32, 8, 1)}
    assert 1 == part_left_out(kernels["stencil"], "QQi", A, B, 256, **square)
    assert 1 == part_left_out(kernels["transpose"], "QQi", A, B, 256, grid=(8, 8, 1), block=(32, 8, 1))
    assert 1 == part_left_out(kernels["scan"], "QQ", A, B, grid=(64, 1, 1), block=(256, 1, 1))
    line = {"grid": (64, 1, 1), "block": (256, 1, 1)}
    assert 1 == part_left_out(kernels["vecadd"], "QQQi", A, B, C, 1 << 14, **line)
    assert 1 == part_left_out(kernels["vecadd"], "QQQi", A, B, A, 1 << 14, **line)  # each thread its own element
    tiles = {"grid": (16, 16, 1), "block": (16, 16, 1)}
    assert 1 == part_left_out(kernels["matmul"], "QQQi", A, B, C, 256, **tiles)


def test_fences_and_barriers_that_may_part_leave_threads_their_own_elements(ptx_of):
    kernel = jit.load(
        ptx_of("""extern "C" __global__ void own(int *a, int n) {
            __shared__ int mine[64];
            mine[threadIdx.x] = a[64 * blockIdx.x + threadIdx.x];
            if (n > 1) __syncthreads();
            else { __threadfence(); __syncwarp(); __syncthreads(); }
            mine[threadIdx.x] += 1;
            a[64 * blockIdx.x + threadIdx.x] = mine[threadIdx.x] + mine[0];
        }""")
    ).kernels["own"]
    launch = {"grid": (8, 1, 1), "block": (64, 1, 1)}
    # All but the two writes of its own elements, which meet the read of the first one, and that read.
    assert 1 / 2 == part_left_out(kernel, "Qi", A, 2, **launch)


def test_arguments_that_overlap_are_looked_at(kernels):
    line = {"grid": (64, 1, 1), "block": (256, 1, 1)}
    some = part_left_out(kernels["vecadd"], "QQQi", A, B, A + 4, 1 << 14, **line)
    assert 1 / 3 == pytest.approx(some)  # what is read of b
    assert 0 == part_left_out(kernels["vecadd"], "QQQi", A, A, A + 2, 1 << 14, **line)
    end = A + 4 * (1 << 14)
    assert 1 == part_left_out(kernels["vecadd"], "QQQi", A, B, end, 1 << 14, **line)
    assert 1 / 3 == pytest.approx(part_left_out(kernels["vecadd"], "QQQi", A, B, end - 1, 1 << 14, **line))


def test_what_branches_leave_out_is_not_accessed(kernels):
    """The last block is not full, and the borders of the matrix are not written.

    Writes of the matrix are looked at: but for the branch, the ends of rows would meet the next rows.
    """
    some = 1000
    line = {"grid": (4, 1, 1), "block": (256, 1, 1)}
    assert 1 == part_left_out(kernels["vecadd"], "QQQi", A, A + 4 * some, A + 8 * some, some, **line)
    side, wide = 250, {"grid": (8, 32, 1), "block": (32, 8, 1)}
    stencil = part_left_out(kernels["stencil"], "QQi", A, A + 4 * side * side, side, **wide)
    assert 5 / 6 == pytest.approx(stencil)


def test_indices_that_may_wrap_around_are_looked_at(kernels):
    """With so many threads the index has no 32 bits: where it begins anew, blocks meet."""
    part = part_left_out(kernels["vecadd"], "QQQi", A, B, C, 1 << 14, grid=(1 << 24, 1, 1), block=(256, 1, 1))
    assert 0 == part


@pytest.mark.parametrize(
    ("offset", "width", "races"),
    [(0, 8, False), (7, 1, False), (8, 1, True), (4, 8, True), (11, 1, True), (12, 4, False), (12, 1, False)],
)
def test_a_read_anywhere_races_if_a_byte_of_it_is_written(offset, width, races):
    value = "%d3" if width == 8 else "%r1" if width == 4 else "%h0"
    kernel = jit.load(
        f""".version 7.8
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) {{
.reg .b16 %h<1>; .reg .b32 %r<2>; .reg .b64 %d<4>; .reg .pred %q;
ld.param.u64 %d0, [p]; cvta.to.global.u64 %d0, %d0; mov.u32 %r0, %tid.x; setp.eq.u32 %q, %r0, 0;
@%q st.global.u32 [%d0+8], %r0;
ld.global.u64 %d1, [%d0+64]; add.s64 %d2, %d0, %d1;
@!%q ld.global.u{8 * width} {value}, [%d2];
ret; }}""".encode()
    ).kernels["k"]
    whole = np.zeros(2 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][:4096]
    memory[64] = offset
    params = ctypes.c_uint64(memory.ctypes.data)
    found = kernel.launch(
        jit.LaunchShape((1, 1, 1), (2, 1, 1)),
        ctypes.addressof(params),
        jit.LaunchOptions(shadow=jit.Shadow(memory.ctypes.data, 4096, Instrument.RACECHECK)),
    )
    assert races == bool(found)


PAGE = 4096


@pytest.fixture
def shadow() -> jit.Shadow:
    """Of 64 pages, of which those from the second on can be used but for the last bytes; nothing has values."""
    made = jit.Shadow(1 << 40, 64 * PAGE, Instrument.MEMCHECK | Instrument.INITCHECK)
    made.allocated((1 << 40) + PAGE, 62 * PAGE + 100)
    return made


def test_memory_is_usable_if_each_byte_is(shadow):
    start, stop = shadow.base + PAGE, shadow.base + 63 * PAGE + 100
    assert shadow.is_usable(start, stop, to_write=True)
    assert not shadow.is_usable(start - 1, stop, to_write=False)
    assert not shadow.is_usable(start, stop + 1, to_write=False)
    assert not shadow.is_usable(shadow.base - 4, start + 4, to_write=False)
    shadow.read_only(start + 10 * PAGE + 8, 8)
    assert shadow.is_usable(start, stop, to_write=False)
    assert not shadow.is_usable(start, stop, to_write=True)
    assert shadow.is_usable(start + 10 * PAGE + 16, stop, to_write=True)
    shadow.freed(start + 5 * PAGE, 1)
    assert not shadow.is_usable(start, stop, to_write=False)


def test_memory_that_is_allocated_or_copied_to_anew_has_no_values_again(shadow):
    start, stop = shadow.base + PAGE, shadow.base + 63 * PAGE + 100
    assert not shadow.has_values(start, stop)
    shadow.written(start, 40 * PAGE + 7)
    for _ in range(2):  # the second time from what is remembered
        assert shadow.has_values(start, start + 40 * PAGE + 7)
        assert not shadow.has_values(start, start + 40 * PAGE + 8)
        assert not shadow.has_values(start + 40 * PAGE + 7, start + 40 * PAGE + 8)
    shadow.written(start + 40 * PAGE + 7, 1)
    assert shadow.has_values(start, start + 40 * PAGE + 8)
    shadow.allocated(start + 3 * PAGE + 1, 1)
    assert not shadow.has_values(start, start + 4 * PAGE)
    assert shadow.has_values(start, start + 3 * PAGE + 1)
    shadow.written(start + 3 * PAGE, PAGE)
    assert shadow.has_values(start, start + 40 * PAGE)
    shadow.copied(start + 20 * PAGE, start + 50 * PAGE, 4)
    assert not shadow.has_values(start, start + 40 * PAGE)
    assert shadow.has_values(start + 20 * PAGE + 4, start + 40 * PAGE)


PLAIN_AND_NOT = """
extern "C" __global__ void add(int *a, const int *b) { a[threadIdx.x] += b[threadIdx.x]; }
extern "C" __global__ void pick(int *a, const int *b) { a[threadIdx.x] += a[b[threadIdx.x]]; }
extern "C" __global__ void local(int *a, const int *b) {
    int some[16];
    for (int i = 0; i < 16; i++) some[i] = b[i];
    a[threadIdx.x] = some[a[threadIdx.x] & 15];
}
"""


@pytest.mark.parametrize(
    ("name", "kinds", "is_plain"),
    [
        ("add", Instrument.MEMCHECK | Instrument.INITCHECK | Instrument.RACECHECK, True),
        ("add", Instrument.MEMCHECK | Instrument.SYNCCHECK, False),
        ("pick", Instrument.MEMCHECK, False),
        ("local", Instrument.MEMCHECK, False),  # of local memory nothing is known before
        ("local", Instrument.INITCHECK, True),
    ],
)
def test_a_launch_of_which_nothing_need_be_looked_at_runs_the_code_of_one_that_is_not_checked(
    ptx_of, name, kinds, is_plain
):
    kernel = jit.load(ptx_of(PLAIN_AND_NOT)).kernels[name]
    whole = np.zeros(3 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][: 2 * 4096]
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, kinds)
    shadow.allocated(memory.ctypes.data, memory.nbytes)
    shadow.written(memory.ctypes.data, memory.nbytes)
    params = (ctypes.c_uint64 * 2)(memory.ctypes.data, memory.ctypes.data + 4096)
    shape, options = jit.LaunchShape((1, 1, 1), (64, 1, 1)), jit.LaunchOptions(shadow=shadow)
    assert [] == kernel.launch(shape, ctypes.addressof(params), options)
    assert is_plain == ([Instrument.NONE] == [variant.instrument for variant in kernel.translation.variants])


CACHED_THEN_WRITTEN = """
extern "C" __global__ void k(int *g, int *h, const int *at) {
    int b = blockIdx.x;
    if (b < 4) h[b] = LOAD(g + at[b]);
    if (b == 4) g[at[b]] = 1;
    if (b == 5) h[b] = LOAD(g + at[b]) + 1;
}
"""


@pytest.mark.parametrize("load", ["*", "__ldg"])
def test_a_read_after_the_write_is_reported_though_reads_before_it_stood_for_all(ptx_of, load):
    """Four blocks read the word, so that no further read need be looked at, until the fifth block writes it."""
    kernel = jit.load(ptx_of(CACHED_THEN_WRITTEN.replace("LOAD", load))).kernels["k"]
    whole = np.zeros(2 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][:4096]
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.RACECHECK)
    params = (ctypes.c_uint64 * 3)(*(memory.ctypes.data + offset for offset in (0, 1024, 2048)))
    found = kernel.launch(
        jit.LaunchShape((6, 1, 1), (1, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
    )
    races = {(one.defect, one.block[0]) for one in found if one.defect is not jit.DefectCode.STALE_READ}
    assert {(jit.DefectCode.WRITE_AFTER_READ, 4), (jit.DefectCode.READ_AFTER_WRITE, 5)} == races
    stale = [(one.block[0], one.count) for one in found if one.defect is jit.DefectCode.STALE_READ]
    assert ([(0, 1)] if load == "__ldg" else []) == stale  # of each byte the first read
