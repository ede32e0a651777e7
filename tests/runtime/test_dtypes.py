"""Number types: promotion, casts between them, what they are in CUDA C++."""

from __future__ import annotations

import itertools
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool.errors import UsageError
from cudatool.runtime import dtypes

NAMES = {
    "b1": np.bool, "u1": np.uint8, "i1": np.int8, "i2": np.int16, "i4": np.int32, "i8": np.int64,
    "f2": np.float16, "bf": cudatool.bfloat16, "f4": np.float32, "f8": np.float64, "c8": np.complex64, "c16": np.complex128,
}  # fmt: skip

# torch.promote_types, as its documentation of type promotion states it.
PROMOTIONS = """
     b1  u1  i1  i2  i4  i8  f2  bf  f4  f8  c8  c16
b1   b1  u1  i1  i2  i4  i8  f2  bf  f4  f8  c8  c16
u1   u1  u1  i2  i2  i4  i8  f2  bf  f4  f8  c8  c16
i1   i1  i2  i1  i2  i4  i8  f2  bf  f4  f8  c8  c16
i2   i2  i2  i2  i2  i4  i8  f2  bf  f4  f8  c8  c16
i4   i4  i4  i4  i4  i4  i8  f2  bf  f4  f8  c8  c16
i8   i8  i8  i8  i8  i8  i8  f2  bf  f4  f8  c8  c16
f2   f2  f2  f2  f2  f2  f2  f2  f4  f4  f8  c8  c16
bf   bf  bf  bf  bf  bf  bf  f4  bf  f4  f8  c8  c16
f4   f4  f4  f4  f4  f4  f4  f4  f4  f4  f8  c8  c16
f8   f8  f8  f8  f8  f8  f8  f8  f8  f8  f8  c16 c16
c8   c8  c8  c8  c8  c8  c8  c8  c8  c8  c16 c8  c16
c16  c16 c16 c16 c16 c16 c16 c16 c16 c16 c16 c16 c16
"""
HEAD, *ROWS = [line.split() for line in PROMOTIONS.strip().splitlines()]
TABLE = {(row[0], column): wanted for row in ROWS for column, wanted in zip(HEAD, row[1:], strict=True)}

FP8 = [cudatool.float8_e4m3fn, cudatool.float8_e5m2]


def test_promotion_of_two_dtypes():
    actual = {pair: cudatool.promote_types(*(NAMES[name] for name in pair)) for pair in TABLE}
    assert {pair: np.dtype(NAMES[name]) for pair, name in TABLE.items()} == actual


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *itertools.product(FP8, [np.float32, np.int8]),
        tuple(FP8),
        (np.uint16, np.uint32),
        (np.uint64, np.int64),
        (np.uint16, np.bool),
    ],
)
def test_dtypes_without_a_common_one_are_refused(a, b):
    with pytest.raises(UsageError, match="have no common type"):
        cudatool.promote_types(a, b)


def test_a_dtype_and_itself_are_promoted_to_it():
    for dtype in (*FP8, np.uint16, np.uint64):
        assert np.dtype(dtype) == cudatool.promote_types(dtype, dtype)
    assert np.dtype(np.float16) == cudatool.promote_types(np.uint32, np.float16)


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        # a number takes the array's dtype, unless it is of a higher category
        (["f2", 2.5], "f2"), (["i4", 2], "i4"), (["u1", 300], "u1"), (["i4", 2.5], "f4"), (["b1", 2], "i8"),
        (["b1", True], "b1"), (["f2", 1j], "c8"), (["f8", 1j], "c16"), (["i2", 1j], "c8"), (["bf", np.float64(1)], "bf"),
        # and so does an array without dimensions
        (["f2", "f8:0"], "f2"), (["i4", "i8:0"], "i4"), (["i4", "f8:0"], "f8"), (["f4", "c16:0"], "c8"), (["i4:0", "f2:0"], "f2"),
        # numbers, then arrays without dimensions, then arrays
        (["i4:0", 2.5], "f4"), (["i4", "f2:0", 2.5], "f2"), (["f2", "bf"], "f4"), (["f2", "bf", "i8"], "f4"), ([2, 2.5], "f4"), ([True, 2], "i8"),
    ],
)  # fmt: skip
def test_result_type_of_arrays_and_numbers(operands, expected):
    def operand(text):
        name, _, dimensions = text.partition(":")
        return cudatool.empty(() if dimensions else 1, NAMES[name])

    actual = cudatool.result_type(*(operand(value) if isinstance(value, str) else value for value in operands))
    assert np.dtype(NAMES[expected]) == actual


def test_an_8_bit_float_and_a_number_stay_an_8_bit_float():
    assert dtypes.result_type(cudatool.empty(2, cudatool.float8_e5m2), 0.5) == cudatool.float8_e5m2


def test_result_type_of_nothing_is_refused():
    with pytest.raises(UsageError, match="at least one"):
        cudatool.result_type()
    with pytest.raises(UsageError, match="does not compute with"):
        cudatool.result_type(cudatool.zeros(1, "M8[s]"), 1)


def test_casts_to_a_lower_category_are_not_safe():
    assert cudatool.can_cast(np.int64, np.int8) and cudatool.can_cast(np.float64, cudatool.float8_e5m2)
    assert cudatool.can_cast(np.bool, np.uint8) and cudatool.can_cast(np.float16, np.complex64)
    assert not cudatool.can_cast(np.int8, np.bool)
    assert not cudatool.can_cast(np.float16, np.int64)
    assert not cudatool.can_cast(np.complex64, np.float64)


SPECIAL = [0.0, -0.0, 1.0, -1.5, 448.0, 464.0, 465.0, 57344.0, 61440.0, 65520.0, 1e-3, 2.0**-9, 2.0**-10, 3 * 2.0**-11,
           2.0**-16, 2.0**-17, 1.0625, 1.1875, 3.3e38, 1e-40, np.inf, -np.inf, np.nan]  # fmt: skip


def same_numbers(actual, expected):
    np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))
    signs = [np.signbit(x.astype(np.float32)) & ~np.isnan(expected.astype(np.float32)) for x in (actual, expected)]
    np.testing.assert_array_equal(*signs)


@pytest.mark.parametrize("dtype", ["float16", cudatool.bfloat16, *FP8])
def test_small_floats_round_as_ml_dtypes_does(dtype):
    rng = np.random.default_rng(3)
    host = np.r_[SPECIAL, rng.standard_normal(200) * 10.0 ** rng.integers(-12, 6, 200)].astype(np.float32)
    with np.errstate(all="ignore"):
        expected = host.astype(dtype)
    rounded = cudatool.asarray(host).to(dtype)
    same_numbers(rounded.get(), expected)
    same_numbers(rounded.to(np.float32).get(), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", FP8)
def test_every_8_bit_float_is_read_right(dtype):
    host = np.arange(256, dtype=np.uint8).view(dtype)
    same_numbers(cudatool.asarray(host).to(np.float32).get(), host.astype(np.float32))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.array([0, 1, -3, 7]), cudatool.bfloat16),
        (np.array([0, 1, 3.7, -2.2], ml_dtypes.bfloat16), np.int16),
        (np.array([0.5, 2, 0], np.float16), cudatool.bfloat16),
        (np.array([0.5, 0, -0.0, np.nan], ml_dtypes.bfloat16), np.bool),
        (np.array([1.5, -2]), np.complex64),
        (np.array([True, False]), cudatool.float8_e4m3fn),
        (np.array([0.5, 448], ml_dtypes.float8_e4m3fn), cudatool.float8_e5m2),
    ],
)
def test_casts_between_categories(source, target):
    expected = source.astype(np.float32).astype(target) if source.dtype.kind == "V" else source.astype(target)
    actual = cudatool.asarray(source).to(target).get()
    assert np.dtype(target) == actual.dtype
    np.testing.assert_array_equal(actual.astype(np.complex128), expected.astype(np.complex128))


def test_of_a_complex_number_that_becomes_real_the_real_part_stays():
    source = cudatool.asarray(np.array([1 + 2j, 3j, -2]))
    np.testing.assert_array_equal(source.to(np.float32).get(), [1, 0, -2])
    np.testing.assert_array_equal(source.to(np.bool).get(), [True, True, True])
    np.testing.assert_array_equal(source.to(np.complex64).get(), [1 + 2j, 3j, -2])


@pytest.mark.parametrize("dtype", ["float16", cudatool.bfloat16, *FP8, "complex64", "complex128"])
def test_fill(dtype):
    assert [1.5] * 5 == cudatool.full(5, 1.5, dtype).get().astype(np.complex128).tolist()
    wide = cudatool.zeros((4, 2), dtype)
    wide[:, 1] = 2
    assert [[0, 2]] * 4 == wide.get().astype(np.complex128).tolist()


@pytest.mark.parametrize("dtype", [cudatool.bfloat16, *FP8, "complex128"])
def test_copies_of_any_order(dtype):
    host = np.arange(24).reshape(2, 3, 4).astype(dtype)
    array = cudatool.asarray(host)
    np.testing.assert_array_equal(array.transpose(2, 0, 1).contiguous().get(), host.transpose(2, 0, 1))


def test_every_number_type_has_a_name_in_c():
    assert "bfloat16" == dtypes.c_type(cudatool.bfloat16)
    assert "long long" == dtypes.c_type(np.int64)
    size = "extern \"C\" __global__ void sizes(int *out) { " + " ".join(
        f"out[{k}] = sizeof({name});" for k, (name, _) in enumerate(dtypes.NUMBER_TYPES.values())
    ) + " }"  # fmt: skip
    out = cudatool.zeros(len(dtypes.NUMBER_TYPES), np.int32)
    cudatool.compile(dtypes.NUMBERS + size, "sizes")[1, 1](out)
    assert [dtype.itemsize for dtype in dtypes.NUMBER_TYPES] == out.get().tolist()
    with pytest.raises(UsageError, match="does not compute with"):
        dtypes.c_type("S4")


def test_an_older_numpy_is_refused_in_one_line():
    program = (
        "import sys, numpy\n"
        "numpy.__version__ = '1.26.4'\n"
        "from cudatool.__main__ import main\n"
        "sys.argv = ['cudatool', 'sanitize', '--device', 'sim', '-c', 'import cudatool; cudatool.zeros(1)']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = "cudatool: error: cudatool needs NumPy 2.1 or newer, and this is 1.26.4: pip install 'numpy>=2.1'\n"
    assert (2, "", said) == (done.returncode, done.stdout, done.stderr)
