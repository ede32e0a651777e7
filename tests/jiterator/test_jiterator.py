"""Elementwise functions from C++ source."""

from __future__ import annotations

import numpy as np
import pytest

import cudatool
from cudatool.errors import CompileError, UsageError
from cudatool.jiterator import create_jit_fn, create_multi_output_jit_fn

AXPY = "template <typename T> T axpy(T x, T y, T a, T b) { return a * x + y + b; }"


def numbers():
    return cudatool.asarray(np.arange(12, dtype=np.float32).reshape(3, 4))


def test_numbers_go_by_keyword_and_have_defaults():
    x = numbers()
    axpy = create_jit_fn(AXPY, a=1.0, b=0)
    np.testing.assert_array_equal(axpy(x, x).get(), 2 * x.get())
    np.testing.assert_array_equal(axpy(x, x, b=2.5, a=3).get(), 4 * x.get() + 2.5)
    assert "<JitFunction axpy>" == repr(axpy)


@pytest.mark.parametrize("number", [float("inf"), np.float32(2.5), np.int64(3)], ids=repr)
def test_a_default_may_be_any_number(number):
    scale = create_jit_fn("template <typename T> T scale(T x, T by) { return x * by; }", by=number)
    assert [number, -2 * number] == scale(cudatool.asarray(np.array([1, -2], np.float32))).get().tolist()


def test_arrays_are_broadcast_and_promoted():
    x = numbers()
    axpy = create_jit_fn(AXPY, a=2, b=0)
    row = cudatool.asarray(np.arange(4, dtype=np.float64))
    actual = axpy(x, row)
    assert np.float64 == actual.dtype
    np.testing.assert_array_equal(actual.get(), 2 * x.get() + np.arange(4))
    np.testing.assert_array_equal(axpy(x.T, x.T).get(), 3 * x.get().T)
    assert np.int64 == axpy(x.to(np.int32), x.to(np.int64)).dtype


def test_half_types_are_computed_in_float32():
    x = numbers()
    huge = create_jit_fn("template <typename T> T huge(T x) { return x * 1e6f / 1e6f; }")
    actual = huge(x.to(np.float16))
    assert np.float16 == actual.dtype
    np.testing.assert_array_equal(actual.get(), x.get())


def test_the_last_function_is_meant():
    x = numbers()
    helper = "// template <typename T> T wrong(T x) {}\ntemplate <typename T> T twice(T v) { return v + v; }\n"
    four = create_jit_fn(helper + "template <typename T> T four(T v) { return twice(twice(v)); }")
    np.testing.assert_array_equal(four(x).get(), 4 * x.get())


def test_several_outputs():
    x = numbers()
    both = create_multi_output_jit_fn(
        "template <typename T> void both(T x, T y, T a, T &sum, T &difference) { sum = x + a * y; difference = x - a * y; }",
        num_outputs=2,
        a=1,
    )
    total, difference = both(x, x[:1], a=2)
    np.testing.assert_array_equal(total.get(), x.get() + 2 * x.get()[:1])
    np.testing.assert_array_equal(difference.get(), x.get() - 2 * x.get()[:1])


def test_a_call_is_told(calls):
    x = numbers()
    create_jit_fn(AXPY, a=1, b=0)(x, x)
    names = [event.name for event in calls if "jiterator" in event.name]
    assert ["cudatool.jiterator.create_jit_fn", "cudatool.jiterator.JitFunction.__call__"] == names


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: create_jit_fn("__global__ void kernel(int *x) {}"), "no function was found; write: template"),
        (lambda: create_jit_fn(AXPY, b=1, a=0), r"axpy\(x, y, a, b\) must take .* in the order of the keywords: b, a"),
        (lambda: create_jit_fn(AXPY, a=1, c=0), "in the order of the keywords: a, c"),
        (lambda: create_jit_fn(AXPY, a=1, b="2"), "the default of b must be a number, not str"),
        (lambda: create_jit_fn("template <typename T> void f(T x, T &y) { y = x; }"), "f returns nothing; use"),
        (lambda: create_multi_output_jit_fn(AXPY, 1, a=1, b=1), "axpy returns T; it must be void"),
        (lambda: create_multi_output_jit_fn(AXPY, 9), "num_outputs must be between 1 and 8"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_wrong_calls_are_refused():
    x = numbers()
    axpy = create_jit_fn(AXPY, a=1, b=0)
    with pytest.raises(UsageError, match="axpy takes DeviceArrays; numbers go by keyword"):
        axpy(x, 2)
    with pytest.raises(TypeError, match=r"\(x, y, a=, b=\) was called with 2 operands, c"):
        axpy(x, x, c=1)
    with pytest.raises(UsageError, match="do not fit each other"):
        axpy(x, x[:, :3])


def test_what_does_not_compile_shows_the_messages():
    x = numbers()
    with pytest.raises(CompileError, match="no_such"):
        create_jit_fn("template <typename T> T bad(T x) { return no_such(x); }")(x)
