"""Reductions against NumPy in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cudatool
from cudatool import ops
from cudatool.errors import UsageError
from cudatool.ops import _statistics

INTEGERS = np.random.default_rng(4).integers(-3, 4, (3, 8, 12)).astype(np.float64)
ALL_DIMS = [None, 0, 1, -1, (0, 2), (1, 2)]

FUNCTIONS = {
    # operation -> NumPy's, by axis
    "all": np.all,
    "amax": np.max,
    "amin": np.min,
    "any": np.any,
    "argmax": np.argmax,
    "argmin": np.argmin,
    "count_nonzero": np.count_nonzero,
    "logsumexp": lambda x, axis: np.log(np.exp(x).sum(axis)),
    "mean": np.mean,
    "norm": lambda x, axis: np.sqrt((x * x).sum(axis)),
    "prod": np.prod,
    "std": lambda x, axis: np.std(x, axis, ddof=1),
    "sum": np.sum,
    "var": lambda x, axis: np.var(x, axis, ddof=1),
}


def close(actual, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert expected.shape == actual.shape
    np.testing.assert_allclose(actual.get().astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_along_the_innermost_dimension_and_another(name):
    array = cudatool.asarray(INTEGERS.astype(np.float32))
    for dim in (1, 2):
        close(getattr(ops, name)(array, dim=dim), FUNCTIONS[name](INTEGERS, axis=dim))


def test_every_reduction_is_tested():
    assert {*FUNCTIONS, "max", "min", "Extreme"} == set(_statistics.__all__)


@pytest.mark.parametrize("dim", ALL_DIMS)
def test_any_dimensions(dim):
    array = cudatool.asarray(INTEGERS.astype(np.float32))
    close(ops.sum(array, dim), INTEGERS.sum(dim))
    close(ops.sum(array, dim, keepdim=True), INTEGERS.sum(dim, keepdims=True))
    view, host = array.transpose(2, 0, 1)[::2, :, 1:], INTEGERS.transpose(2, 0, 1)[::2, :, 1:]
    close(ops.sum(view, dim), host.sum(dim))


def test_index_in_the_flat_array_is_in_c_order():
    array = cudatool.asarray(INTEGERS.astype(np.float32))
    for view in (lambda x: x, lambda x: x.transpose(2, 0, 1), lambda x: x[:, ::-1]):
        assert view(INTEGERS).argmax() == int(ops.argmax(view(array)))
        assert view(INTEGERS).argmin() == int(ops.argmin(view(array)))


# Sizes at which a block has one lane more, packs are not full, and several blocks share an output.
@pytest.mark.parametrize("shape", [(1,), (3,), (255,), (257,), (1031,), (70001,), (40000, 3), (3, 40000), (2, 5, 3000)])
def test_sums_of_all_sizes(shape):
    host = np.random.default_rng(5).integers(-8, 9, shape).astype(np.float32)
    array = cudatool.asarray(host)
    for dim in (None, 0, -1):  # whole numbers: every order of addition gives the same
        np.testing.assert_array_equal(ops.sum(array, dim).get(), host.sum(dim))


def test_blocks_that_share_an_output_agree_on_variance_and_place():
    host = np.random.default_rng(6).standard_normal(70001) + 100
    array = cudatool.asarray(host)
    close(ops.var(array), host.var(ddof=1), 1e-11)
    assert host.argmax() == int(ops.argmax(array))


def test_sums_are_the_same_on_every_run():
    array = cudatool.asarray(np.random.default_rng(7).standard_normal(30001).astype(np.float32))
    assert 1 == len({float(ops.sum(array)) for _ in range(3)})


@pytest.mark.parametrize("dtype", ["float16", cudatool.bfloat16])
def test_half_types_are_summed_in_float32(dtype):
    array = cudatool.ones(4096, dtype)
    assert (4096, np.dtype(dtype)) == (float(ops.sum(array)), ops.sum(array).dtype)  # a sum in bfloat16 stays at 256
    assert 64 == float(ops.norm(array))
    assert np.dtype(np.float32) == ops.sum(array, dtype=np.float32).dtype


def test_integers_are_summed_in_int64():
    host = np.full((2, 200), 100, np.int8)
    for name, expected in (("sum", [20000, 20000]), ("prod", [0, 0])):
        actual = getattr(ops, name)(cudatool.asarray(host), 1)
        assert (expected, np.int64) == (actual.get().tolist(), actual.dtype)
    assert 2 == int(ops.sum(cudatool.asarray(np.array([True, False, True]))))
    assert 2.5 == float(ops.mean(cudatool.asarray(np.array([2, 3])), dtype=np.float32))


def test_truth_of_bytes_is_a_byte():
    array = cudatool.asarray(np.array([3, 0], np.uint8))
    assert (np.uint8, 1, 0) == (ops.any(array).dtype, ops.any(array).item(), ops.all(array).item())


def test_complex_sums_means_and_norms():
    host = np.array([[1 + 2j, 3j], [2, -1 - 1j]])
    array = cudatool.asarray(host)
    np.testing.assert_allclose(ops.sum(array, 0).get(), host.sum(0))
    np.testing.assert_allclose(ops.mean(array).get(), host.mean())
    norm = ops.norm(array, dim=1)
    assert np.float64 == norm.dtype
    np.testing.assert_allclose(norm.get(), np.linalg.norm(host, axis=1))


@pytest.mark.parametrize("p", [0, 1, 2, 3.5, np.inf, -np.inf])
def test_norms(p):
    host = np.array([[1.0, -2, 0, 3], [4, -1, 2, 2]])
    close(ops.norm(cudatool.asarray(host), p, 1), [np.linalg.norm(row, p) for row in host], 1e-12)


def test_correction_of_the_variance():
    host = INTEGERS[0]
    array = cudatool.asarray(host)
    for correction in (0, 1, 2.5):
        close(ops.var(array, 0, correction=correction), host.var(0, ddof=correction), 1e-12)
    with np.errstate(all="ignore"):
        assert np.isnan(float(ops.std(array[:1, 0])))


def test_extremes_with_their_places():
    array = cudatool.asarray(INTEGERS.astype(np.float32))
    assert (3, -3) == (float(ops.max(array)), float(ops.min(array)))
    values, indices = ops.max(array, 1)
    close(values, INTEGERS.max(1))
    np.testing.assert_array_equal(indices.get(), INTEGERS.argmax(1))
    values, indices = ops.min(array, -1, keepdim=True)
    close(values, INTEGERS.min(-1, keepdims=True))
    np.testing.assert_array_equal(indices.get(), INTEGERS.argmin(-1, keepdims=True))


def test_nan_wins_extremes():
    host = np.array([1, np.nan, 5, np.nan, 7], np.float32)
    array = cudatool.asarray(host)
    assert np.isnan(float(ops.amax(array))) and np.isnan(float(ops.amin(array)))
    assert (1, 1) == (int(ops.argmax(array)), int(ops.argmin(array)))


@pytest.mark.parametrize(("low", "dtype"), [*itertools.product((False, True), ["int8", "uint8", "bool"])])
def test_extremes_of_integers(low, dtype):
    host = np.array([[0, 1, 1], [1, 1, 1], [0, 0, 0]], dtype) * np.array([1 if dtype == "bool" else 127], dtype)
    host = host if low or dtype != "int8" else -host - 1
    array = cudatool.asarray(host)
    np.testing.assert_array_equal(ops.amax(array, 1).get(), host.max(1))
    np.testing.assert_array_equal(ops.amin(array, 1).get(), host.min(1))


def test_infinities_in_logsumexp():
    host = np.array([[-np.inf, -np.inf], [-np.inf, 2], [np.inf, 1], [800, 800]], np.float64)
    actual = ops.logsumexp(cudatool.asarray(host), 1).get()
    np.testing.assert_allclose(actual, [-np.inf, 2, np.inf, 800 + np.log(2)])


def test_nan_is_not_lost_in_logsumexp():
    host = np.array([[np.nan, 1], [1, np.nan], [-np.inf, np.nan], [np.inf, np.nan], [np.nan, np.nan]], np.float32)
    assert np.isnan(ops.logsumexp(cudatool.asarray(host), 1).get()).all()
    assert np.isnan(ops.logsumexp(cudatool.asarray(np.r_[np.ones(5000), np.nan, np.ones(5000)]), 0).get())


def test_reductions_of_nothing():
    empty = cudatool.zeros((0, 3))
    assert [0, 0, 0] == ops.sum(empty, 0).get().tolist()
    assert 1 == float(ops.prod(empty))
    assert bool(ops.all(empty)) and not bool(ops.any(empty))
    assert np.isnan(float(ops.mean(empty)))
    assert (0,) == ops.amax(empty, 1).shape
    with pytest.raises(UsageError, match=r"amax of no elements: shape \(0, 3\), dim=0"):
        ops.amax(empty, 0)
    with pytest.raises(UsageError, match="argmax of no elements"):
        ops.argmax(empty)


def test_of_an_array_without_dimensions():
    array = cudatool.full((), 7)
    assert 7 == float(ops.sum(array)) == float(ops.amax(array, 0)) == float(ops.mean(array, -1))


def test_result_goes_to_out():
    array = cudatool.asarray(INTEGERS.astype(np.float32))
    for out in (cudatool.zeros((3, 12)), cudatool.zeros((12, 3), np.float64).T):
        assert out is ops.sum(array, 1, out=out)
        close(out, INTEGERS.sum(1))
    with pytest.raises(UsageError, match="out must be a DeviceArray of shape"):
        ops.sum(array, 1, out=cudatool.zeros(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: ops.sum(a, 3), "dim=3 does not fit an array of 2 dimensions"),
        (lambda a: ops.sum(a, (0, -2)), r"dim=\(0, -2\) does not fit"),
        (lambda a: ops.mean(a.to(np.int32)), "mean does not take int32: it is for float, complex"),
        (lambda a: ops.amax(a.to(np.complex64)), "amax does not take complex64"),
        (lambda a: ops.sum(3), "takes a DeviceArray, not int"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(cudatool.zeros((2, 3)))


@pytest.mark.parametrize("dim", [(), []])
def test_truth_over_no_dimensions_is_that_of_each_element(dim):
    array = cudatool.asarray(np.array([[0, 2], [0.5, 0]]))
    for function in (ops.any, ops.all):
        found = function(array, dim)
        assert (found.dtype, found.get().tolist()) == (np.bool, [[False, True], [True, False]])


def test_logsumexp_of_integers_is_float32():
    found = ops.logsumexp(cudatool.asarray([1, 2, 3]), 0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.item(), np.log(np.exp([1, 2, 3]).sum()), rtol=1e-6)
