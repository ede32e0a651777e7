"""The order of a Triton program's accesses to global memory on the software device; Triton must be installed."""

from __future__ import annotations

import importlib.util
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import cudatool as ct

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

tl = pytest.importorskip("triton.language")
BARRIER = "a barrier"


def _ordered(kernel) -> list[str]:
    """Return before which lines of Triton's a kernel gets barriers."""
    from cudatool.triton_order import ordered

    lines = ordered(kernel.asm["ttgir"], BARRIER).splitlines()
    return [after.strip() for line, after in pairwise(lines) if line.startswith(BARRIER)]


def _operations(kernel) -> list[str]:
    return [line.partition(" = ")[2].split()[0] if " = " in line else line.split()[0] for line in _ordered(kernel)]


# ---- what needs a barrier ----


@triton.jit
def store_then_load(p, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(p + i, i * 2)
    tl.store(out + i, tl.load(p + (i + 1) % B))


@triton.jit
def load_then_store(p, out, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(p + i)
    tl.store(p + (i + 1) % B, x)
    tl.store(out + i, x)


@triton.jit
def store_then_store(p, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(p + i, 0)
    tl.store(p + i * 2 % B, i, mask=i < B // 2)
    tl.store(out + i, i)


@triton.jit
def count(p, out, B: tl.constexpr):
    n = tl.load(p)
    tl.store(p, n + 1)
    tl.store(out + tl.arange(0, B), n)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize(
    ("kernel", "memory", "result", "operation"),
    [
        (store_then_load, lambda a: a * 2, lambda a: np.roll(a * 2, -1), "tt.load"),
        (load_then_store, lambda a: np.roll(a, 1), lambda a: a, "tt.store"),
        (store_then_store, lambda a: np.where(a % 2, 0, a // 2), lambda a: a, "tt.store"),
        (count, lambda a: np.where(a, a, 1), lambda a: a * 0, "tt.store"),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "src") else "",
)
def test_what_a_program_wrote_it_reads_and_what_it_read_it_did_not_write(kernel, memory, result, operation, warps):
    numbers = np.arange(256, dtype=np.int32)
    p, out = ct.asarray(numbers), ct.zeros(256, "i4")
    compiled = kernel[(1,)](p, out, B=256, num_warps=warps)
    assert np.array_equal(memory(numbers), p.get())
    assert np.array_equal(result(numbers), out.get())
    assert [operation] == _operations(compiled)


@triton.jit
def compact(x, p, out, n, B: tl.constexpr):
    """Write what is positive, one after the other; then look at that again and again."""
    found = 0
    i = tl.arange(0, B)
    for k in range(0, n, B):
        v = tl.load(x + k + i)
        more = tl.sum((v > 0).to(tl.int32))
        tl.store(p + found + tl.cumsum((v > 0).to(tl.int32)) - 1, v, mask=v > 0)
        found += more
    limit = 1
    sums = 0
    while limit < 8:
        for k in range(0, found, B):
            v = tl.load(p + k + i, mask=k + i < found, other=0)
            sums += tl.sum(tl.where(v > limit, v, 0))
        limit *= 2
    tl.store(out, sums)


def test_one_barrier_before_a_loop_does_for_all_its_rounds():
    x = np.random.default_rng(0).integers(-9, 10, 1024, dtype=np.int32)
    p, out = ct.zeros(1024, "i4"), ct.zeros(1, "i4")
    compiled = compact[(1,)](ct.asarray(x), p, out, 1024, B=256)
    assert sum(x[x > limit].sum() for limit in (1, 2, 4)) == out.get()[0]
    assert ["scf.while"] == _operations(compiled)


@triton.jit
def sums_of_rows(x, sums, locks, GROUPS: tl.constexpr, B: tl.constexpr):
    """Add up rows in groups, under a lock; the first of a group does not add to what was there."""
    row, i = tl.program_id(0), tl.arange(0, B)
    lock = locks + row % GROUPS
    count = lock + GROUPS
    mine = tl.load(x + row * B + i)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        mine += tl.load(sums + row % GROUPS * B + i)
    tl.store(sums + row % GROUPS * B + i, mine)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def test_threads_take_the_same_branch_by_what_one_of_them_then_changes():
    x = np.arange(9 * 256, dtype=np.float32).reshape(9, 256)
    sums, locks = ct.full((2, 256), np.nan, dtype="f4"), ct.zeros(4, "i4")
    compiled = sums_of_rows[(9,)](ct.asarray(x), sums, locks, GROUPS=2, B=256)
    assert np.array_equal([x[::2].sum(0), x[1::2].sum(0)], sums.get())
    assert ["tt.atomic_rmw"] == _operations(compiled)


# ---- what needs none, and is left as it is ----


@triton.jit
def in_place(p, out, n, B: tl.constexpr):
    for k in range(0, n, B):
        i = k + tl.arange(0, B)
        tl.store(p + i, tl.load(p + i, mask=i < n) + 1, mask=i < n)
    q = p + tl.arange(0, B)
    for k in range(0, n, B):
        tl.store(q, tl.load(q, mask=k + tl.arange(0, B) < n) * 2, mask=k + tl.arange(0, B) < n)
        q += B


@triton.jit
def rows_in_place(p, out, n, stride, B: tl.constexpr):
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        q = p + row * stride
        most = -1000
        for k in range(0, stride, B):
            i = k + tl.arange(0, B)
            most = tl.maximum(most, tl.max(tl.load(q + i, mask=i < stride, other=-1000)))
        for k in range(0, stride, B):
            i = k + tl.arange(0, B)
            tl.store(q + i, tl.load(q + i, mask=i < stride) - most, mask=i < stride)


@triton.jit
def tiles(p, out, stride, B: tl.constexpr):
    r, c = tl.arange(0, 16)[:, None], tl.arange(0, B)[None, :]
    for k in range(4):
        q = p + r * stride + k * B + c
        tl.store(q, tl.load(q) + k)
        tl.store(out + (r * 4 + k) * B + c, k)


@triton.jit
def small(p, out, B: tl.constexpr):
    """Fewer elements than threads: the same ones are in several."""
    i = tl.arange(0, B)
    for k in range(4):
        tl.store(p + k * B + i, tl.load(p + k * B + i) * 2)
        tl.store(out + k * B + i, k)
    tl.store(out + 4 * B + i, 5)
    tl.store(out + 5 * B + i, 6)


@triton.jit
def halves(p, out, half, B: tl.constexpr):
    """Turn each half by the other one, as rotary embeddings do; blocks are larger than halves."""
    i = tl.arange(0, B)
    one, two = tl.load(p + i, mask=i < half), tl.load(p + half + i, mask=i < half)
    tl.store(p + i, one - two, mask=i < half)
    tl.store(p + half + i, one + two, mask=i < half)


@triton.jit
def after_a_sum(p, out, B: tl.constexpr):
    i = tl.arange(0, B)
    total = tl.sum(tl.load(p + i))
    tl.store(p + (i + 1) % B, total + i)


@triton.jit
def with_its_own_barrier(p, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(p + i, i)
    tl.debug_barrier()
    tl.store(out + i, tl.load(p + (i + 1) % B))


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (in_place, (1000,)),
        (tiles, (1024,)),
        (small, ()),
        (halves, (112,)),
        (after_a_sum, ()),
        (with_its_own_barrier, ()),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "src") else "",
)
def test_a_kernel_in_which_threads_keep_to_their_own_elements_stays_as_it_is(kernel, given):
    p, out = ct.zeros(1 << 14, "i4"), ct.zeros(1 << 14, "i4")
    compiled = kernel[(1,)](p, out, *given, B=16 if kernel is small else 256)
    assert [] == _ordered(compiled)


def test_rows_that_may_overlap_are_done_one_after_the_other():
    numbers = np.random.default_rng(0).integers(0, 99, (5, 300), dtype=np.int32)
    p = ct.asarray(numbers)
    compiled = rows_in_place[(1,)](p, ct.zeros(1, "i4"), 5, 300, B=256)
    assert np.array_equal(numbers - numbers.max(1, keepdims=True), p.get())
    assert 1 == len(_operations(compiled))


@triton.jit
def halves_that_overlap(p, half, B: tl.constexpr):
    i = tl.arange(0, B)
    one, two = tl.load(p + i, mask=i < half), tl.load(p + half - 1 + i, mask=i < half)
    tl.store(p + i, one - two, mask=i < half)


def test_a_mask_that_leaves_an_element_to_two_threads_does_not_keep_them_apart():
    numbers = np.arange(256, dtype=np.int32) ** 2
    p = ct.asarray(numbers)
    compiled = halves_that_overlap[(1,)](p, 100, B=256)
    assert np.array_equal(numbers[:100] - numbers[99:199], p.get()[:100])
    assert ["tt.store"] == _operations(compiled)


@triton.jit
def small_and_summed(p, out, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(p + i)
    tl.store(p + i, x + 1)
    tl.store(out, tl.sum(x))


def test_an_element_that_several_threads_read_is_read_before_one_writes_it():
    p, out = ct.asarray(np.arange(16, dtype=np.int32)), ct.zeros(1, "i4")
    compiled = small_and_summed[(1,)](p, out, B=16, num_warps=4)
    assert ([120], ["tt.store"]) == (out.get().tolist(), _operations(compiled))


@triton.jit
def with_an_early_return(p, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(p + i, i)
    if n < 3:
        return
    tl.store(out + i, tl.load(p + (i + 1) % B))


@pytest.mark.parametrize(("n", "first"), [(2, 0), (3, 1)])
def test_a_program_may_return_before_its_barrier(n, first):
    p, out = ct.zeros(256, "i4"), ct.zeros(256, "i4")
    compiled = with_an_early_return[(1,)](p, out, n, B=256)
    assert (first, ["tt.load"]) == (out.get()[0], _operations(compiled))


# ---- random programs, beside the same text in NumPy ----


class _Pointer:
    def __init__(self, memory, index=0) -> None:
        self.memory, self.index = memory, index

    def __add__(self, offset):
        return _Pointer(self.memory, self.index + offset)


def _store(pointer, value, mask=True):
    where = np.broadcast_to(mask, np.shape(pointer.index))
    pointer.memory[np.asarray(pointer.index)[where]] = np.broadcast_to(value, np.shape(pointer.index))[where]


BLOCKS = SimpleNamespace(
    constexpr=int,
    arange=lambda start, end: np.arange(start, end, dtype=np.int32),
    load=lambda pointer: pointer.memory[pointer.index].copy(),
    store=_store,
    sum=lambda values: int(values.sum(dtype=np.int64)),
)


def _index(random_, in_loop: bool) -> str:
    shift = random_.randrange(0, 200)
    choices = ["i", f"i + {shift}", f"(i * 5 + {shift}) % 1024", "(1023 - i)", "i + n", f"(i + {shift}) % B", "B + i"]
    return random_.choice([*choices, *(["k * B + i"] * 5 + ["k * n + i"] if in_loop else [])])


def _body(random_, depth: int, in_loop: bool) -> list[str]:
    lines = []
    for _ in range(random_.randrange(2, 5)):
        kind = random_.choice(["load", "load", "store", "store", "scalar", *(["for", "if"] if depth < 2 else [])])
        if kind == "load":
            lines.append(f"x = x * 3 + tl.load(p + {_index(random_, in_loop)})")
        elif kind == "store":
            mask = random_.choice(["", ", mask=x > 0"])
            lines.append(f"tl.store(p + {_index(random_, in_loop)}, x{mask})")
        elif kind == "scalar":
            lines += [f"s = tl.load(p + {random_.randrange(4)})", "tl.store(p + 1, s + 1)", "x = x + s"]
        elif kind == "for":
            loop = "k" if not in_loop else "m"
            lines.append(f"for {loop} in range(0, {random_.choice(['3', 'n'])}):")
            lines += ["    " + line for line in _body(random_, depth + 1, True)]
        else:
            lines.append(f"if {random_.choice(['tl.load(p + 2) > 5', 'n > 2', 'tl.sum(x & 1) > 40'])}:")
            lines += ["    " + line for line in _body(random_, depth + 1, in_loop)]
            lines.append("else:")
            lines += ["    " + line for line in _body(random_, depth + 1, in_loop)]
    return lines


@pytest.mark.some_of("seed", range(40), 6)
@pytest.mark.parametrize("warps", [1, 4])
def test_random_programs_do_what_their_text_says(tmp_path, seed, warps):
    random_ = random.Random(seed)
    body = _body(random_, 0, False)
    text = "\n    ".join(["def program(p, out, n, B):", "i = tl.arange(0, B)", "x = i", *body, "tl.store(out + i, x)"])
    size = random_.choice([64, 128, 256])  # of the first, some elements are in several threads
    memory, expected = np.arange(2048, dtype=np.int32) % 11, np.zeros(size, np.int32)
    names = {"tl": BLOCKS}
    exec(text, names)
    with np.errstate(over="ignore"):
        names["program"](_Pointer(told := memory.copy()), _Pointer(expected), np.int32(3), size)

    file = tmp_path / f"program_{seed}.py"
    jitted = text.replace("def program(p, out, n, B)", "@triton.jit\ndef program(p, out, n, B: tl.constexpr)")
    file.write_text(f"import triton\nimport triton.language as tl\n\n\n{jitted}\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    p, out = ct.asarray(memory), ct.zeros(size, "i4")
    module.program[(1,)](p, out, 3, B=size, num_warps=warps)
    assert np.array_equal(expected, out.get()), text
    assert np.array_equal(told, p.get()), text
