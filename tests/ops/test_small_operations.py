"""Elementwise calls like one before: what was found out then is used, and never where it would be wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import ops
from cudatool.errors import CudaError, UsageError
from cudatool.ops._pointwise import Pointwise
from cudatool.runtime import interop
from cudatool.trace.events import Event, Kind


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.fixture
def nothing_new(monkeypatch: pytest.MonkeyPatch):
    """Called, it lets every call fail that has to be worked out."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a call was worked out anew")

    return lambda: monkeypatch.setattr(Pointwise, "launch", refuse)


def floats(rng: np.random.Generator, *shape: int, dtype: object = "f4") -> cudatool.DeviceArray:
    return cudatool.asarray(rng.standard_normal(shape).astype(dtype))


@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16], ids=str)
def test_a_call_like_one_before_is_not_worked_out(rng, nothing_new, dtype):
    for repeated in range(2):
        a, b, out = (floats(rng, 3, 8, dtype=dtype) for _ in range(3))
        row = floats(rng, 8, dtype=dtype)
        x, y, z = a.get(), b.get(), row.get()
        assert out is ops.add(a, b, out=out)
        less = x < y
        chosen, filled = ops.where(a < b, a, b), ops.masked_fill(a, b > a, repeated)
        np.testing.assert_array_equal(np.where(less, x, y), chosen.get())
        np.testing.assert_array_equal(np.where(less, np.asarray(repeated, x.dtype), x), filled.get())
        cases = [(x + y, out), (x + y, a + b), (x + z, a + row), (x * x, ops.square(a)), (x + x, a.add(a))]
        cases += [((x.astype("f4") + n).astype(x.dtype), a + n) for n in (1.5 + repeated, 2 - repeated)]
        for expected, found in cases:
            np.testing.assert_array_equal(expected, found.get())
        assert a is a.add_(b, alpha=-2 - 2 * repeated)
        np.testing.assert_array_equal((x + y.astype("f4") * (-2 - 2 * repeated)).astype(x.dtype), a.get())
        nothing_new()


def test_the_number_of_each_call_counts_and_not_its_type_alone(nothing_new):
    a, n = cudatool.ones(4), cudatool.ones(4, np.int32)
    a * 0.0, a + 1, n + 1, n + 1.0
    nothing_new()
    assert [True] * 4 == np.signbit((a * -0.0).get()).tolist()
    for value in (2**53 + 1, 7, -3, 1e300, float("nan")):
        with np.errstate(over="ignore"):
            expected = np.full(4, np.float32(1) + np.float32(value))
        np.testing.assert_array_equal(expected, (a + value if isinstance(value, int) else a * 1.0 * value + 1).get())
    assert (np.int32, 2**31 - 1) == ((n + (2**31 - 2)).dtype, (n + (2**31 - 2)).get()[0])
    assert (np.float32, 3.5) == ((n + 2.5).dtype, (n + 2.5).get()[0])


def test_another_alignment_is_another_way(rng):
    whole = floats(rng, 33)
    out = cudatool.empty(36)
    for start in (0, 1, 0, 1):
        for to in (0, 3):
            found = ops.exp(whole[start : start + 32], out=out[to : to + 32])
            np.testing.assert_allclose(np.exp(whole.get()[start : start + 32]), found.get(), rtol=1e-6)


def test_what_overlaps_or_cannot_be_written_is_noticed_every_time(rng):
    whole, b = floats(rng, 9), floats(rng, 8)
    x, y = whole.get(), b.get()
    first = cudatool.empty(8)
    ops.add(floats(rng, 8), b, out=first)
    ops.add(whole[:8], b, out=whole[:8])
    ops.add(whole[:8], b, out=whole[1:])  # each element is read before another is written
    np.testing.assert_array_equal(x[:8] + y + y, whole.get()[1:])
    halves = floats(rng, 2, 8)
    for _ in range(2):
        expected = halves.get()[0] + y
        np.testing.assert_array_equal(expected, ops.add(halves[0], b, out=halves[1]).get())
    rows = cudatool.empty((8, 8))
    ops.add(b, rows, out=rows)
    with pytest.raises(UsageError, match="read-only"):
        ops.add(b, rows, out=b.broadcast_to((8, 8)))
    with pytest.raises(UsageError, match="shape"):
        ops.add(b, b, out=rows)
    with pytest.raises(UsageError, match="out must be"):
        ops.add(b, b, out=y)
    with pytest.raises(TypeError, match="beta"):
        ops.add(b, b, beta=2)
    np.testing.assert_array_equal(y + y, ops.add(b, other=b).get())


def test_a_known_call_is_told_where_somebody_listens(rng, events: list[Event]):
    a = floats(rng, 8)
    for _ in range(2):
        ops.neg(a, out=a)
    assert 2 == [event.kind for event in events].count(Kind.KERNEL_LAUNCH)


def test_a_known_call_is_enqueued_on_the_current_stream(rng):
    a, out, stream = floats(rng, 8), cudatool.empty(8), cudatool.Stream()
    ops.neg(a, out=out), a + a
    cudatool.synchronize()
    graph = cudatool.CUDAGraph()
    x = a.get()
    with cudatool.graph(graph, stream=stream):
        ops.neg(a, out=out)
        new = a + a
    out.fill_(7)
    graph.replay()
    np.testing.assert_array_equal(-x, out.get())
    np.testing.assert_array_equal(x + x, new.get())
    with cudatool.stream(stream):
        stream.close()
        with pytest.raises(CudaError, match="closed"):
            ops.neg(a, out=out)


def test_a_copy_between_our_arrays_does_not_go_by_what_is_for_other_libraries(rng, monkeypatch):
    a, half = floats(rng, 3, 4), cudatool.empty((3, 4), np.float16)

    def refuse(*_: object) -> None:
        raise AssertionError("an interface was built")

    monkeypatch.setattr(interop, "cuda_array_interface", refuse)
    np.testing.assert_array_equal(a.get().astype("f2"), half.copy_(a).get())
