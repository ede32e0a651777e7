"""Elementwise operations against NumPy in float64."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

import cudatool
from cudatool import ops
from cudatool.errors import UsageError
from cudatool.ops import _activations, _elementwise
from cudatool.trace.events import Kind

erf = np.vectorize(math.erf)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def slope(function, x, step=1e-6):
    return (function(x + step) - function(x - step)) / (2 * step)


REAL = {
    # operation -> NumPy's, of operands between -2 and 2
    "abs": np.abs,
    "add": lambda a, b: a + b,
    "atan2": np.arctan2,
    "ceil": np.ceil,
    "conj": np.conj,
    "copysign": np.copysign,
    "cos": np.cos,
    "div": lambda a, b: a / b,
    "elu": lambda a: np.where(a > 0, a, np.expm1(a)),
    "eq": lambda a, b: a == b,
    "erf": erf,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "floor_divide": np.floor_divide,
    "fmod": np.fmod,
    "ge": lambda a, b: a >= b,
    "gelu": gelu,
    "gelu_backward": lambda a, b: a * slope(gelu, b),
    "gt": lambda a, b: a > b,
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "le": lambda a, b: a <= b,
    "leaky_relu": lambda a: np.where(a > 0, a, 0.01 * a),
    "lerp": lambda a, b, c: a + c * (b - a),
    "logaddexp": np.logaddexp,
    "logical_and": np.logical_and,
    "logical_not": np.logical_not,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "lt": lambda a, b: a < b,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "mul": lambda a, b: a * b,
    "ne": lambda a, b: a != b,
    "neg": np.negative,
    "addcdiv": lambda a, b, c: a + b / c,
    "addcmul": lambda a, b, c: a + b * c,
    "reciprocal": np.reciprocal,
    "relu": lambda a: np.maximum(a, 0),
    "remainder": np.remainder,
    "round": np.round,
    "sigmoid": sigmoid,
    "sigmoid_backward": lambda a, b: a * b * (1 - b),
    "sign": np.sign,
    "silu": lambda a: a * sigmoid(a),
    "silu_backward": lambda a, b: a * slope(lambda x: x * sigmoid(x), b),
    "sin": np.sin,
    "softplus": lambda a: np.log1p(np.exp(a)),
    "square": np.square,
    "sub": lambda a, b: a - b,
    "tan": np.tan,
    "tanh": np.tanh,
    "tanh_backward": lambda a, b: a * (1 - b * b),
    "threshold_backward": lambda a, b: np.where(b <= 0, 0, a),
    "tril": np.tril,
    "triu": np.triu,
    "trunc": np.trunc,
    "where": lambda a, b, c: np.where(a != 0, b, c),
    "masked_fill": lambda a, b, c: np.where(b != 0, c, a),
}
POSITIVE = {"log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "rsqrt": lambda a: a**-0.5,
            "sqrt": np.sqrt, "pow": np.power}  # fmt: skip
BITS = {
    "bitwise_and": np.bitwise_and,
    "bitwise_left_shift": np.left_shift,
    "bitwise_not": np.invert,
    "bitwise_or": np.bitwise_or,
    "bitwise_right_shift": np.right_shift,
    "bitwise_xor": np.bitwise_xor,
}
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}


def reals(count, low=-2.0, dtype=np.float32, shape=(5, 7)):
    """Return arrays with zeros and equal elements among them, each as NumPy's and, not contiguous, as a device's."""
    rng = np.random.default_rng(1)
    hosts = [rng.uniform(low, 2, shape).astype(dtype) for _ in range(count)]
    for host in hosts:
        host[0] = hosts[0][0]
        if low < 0 and host is not hosts[-1]:  # the last one may be a divisor
            host[1] = 0
    return hosts, [spread(host) for host in hosts]


def spread(host):
    """Return a device array with gaps between the elements."""
    wide = cudatool.zeros((*host.shape, 2), host.dtype)
    wide[..., 0] = host
    return wide[..., 0]


def operands_of(name):
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters)


def check(actual, expected, dtype):
    tolerance = TOLERANCES.get(np.dtype(dtype).name, 0)
    np.testing.assert_allclose(actual.get().astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [*REAL, *POSITIVE])
def test_floats(name):
    function = REAL.get(name) or POSITIVE[name]
    hosts, arrays = reals(operands_of(name), 0.1 if name in POSITIVE else -2.0)
    with np.errstate(all="ignore"):
        expected = function(*(host.astype(np.float64) for host in hosts))
    actual = getattr(ops, name)(*arrays)
    assert (np.dtype(np.bool) if expected.dtype == np.bool else np.dtype(np.float32)) == actual.dtype
    check(actual, expected, np.float32)


@pytest.mark.parametrize("name", BITS)
def test_bits(name):
    hosts = [np.arange(-9, 12), np.arange(21) % 5][: operands_of(name)]
    actual = getattr(ops, name)(*map(cudatool.asarray, hosts))
    np.testing.assert_array_equal(actual.get(), BITS[name](*hosts))


def test_every_operation_is_tested():
    tables = {*REAL, *POSITIVE, *BITS, "clamp"}
    assert tables == {*_elementwise.__all__, *_activations.__all__} - {"elementwise", "one_of"}


@pytest.mark.parametrize("dtype", ["float16", cudatool.bfloat16, "float64"])
@pytest.mark.parametrize("name", ["add", "exp", "gelu"])
def test_other_floats_in_packs(name, dtype):
    hosts, _ = reals(operands_of(name), dtype=dtype, shape=(61,))
    actual = getattr(ops, name)(*map(cudatool.asarray, hosts))
    assert np.dtype(dtype) == actual.dtype
    check(actual, REAL[name](*(host.astype(np.float64) for host in hosts)), dtype)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "complex64"])
def test_sum_of_other_numbers(dtype):
    host = (np.arange(19) * 13).astype(dtype)
    actual = ops.add(cudatool.asarray(host), cudatool.asarray(host))
    assert np.dtype(dtype) == actual.dtype
    np.testing.assert_array_equal(actual.get(), host + host)


def test_complex_arithmetic():
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(6) + 1j * rng.standard_normal(6) for _ in range(2))
    x, y = cudatool.asarray(a), cudatool.asarray(b)
    for name, expected in (("mul", a * b), ("div", a / b), ("abs", np.abs(a)), ("conj", a.conj()), ("exp", np.exp(a))):
        actual = getattr(ops, name)(*(x, y)[: operands_of(name)])
        assert expected.dtype == actual.dtype
        np.testing.assert_allclose(actual.get(), expected, rtol=1e-14)
    infinite = ops.div(x[:1], 0).get()
    assert np.isinf(infinite.real) and np.isinf(infinite.imag)
    with pytest.raises(UsageError, match="maximum does not take complex128: it is for bool, integer, float"):
        ops.maximum(x, y)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1023, 1024, 1029])
def test_sizes_around_packs_and_blocks(size):
    host = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(ops.add(cudatool.asarray(host), 1).get(), host + 1)


def test_packs_need_aligned_addresses():
    base = cudatool.asarray(np.arange(33, dtype=np.float32))
    np.testing.assert_array_equal(ops.add(base[1:], base[:-1]).get(), 2 * np.arange(32) + 1)
    out = cudatool.zeros(34)
    ops.add(base, 1, out=out[1:])
    np.testing.assert_array_equal(out.get(), np.arange(34))


@pytest.mark.parametrize(
    ("first", "second"),
    [((4, 8), (8,)), ((4, 8), (4, 1)), ((3, 1, 8), (5, 1)), ((2, 3), ()), ((0, 3), (3,)), ((4, 1), (1, 8))],
)
def test_broadcasting(first, second):
    a, b = (np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for shape in (first, second))
    actual = ops.add(cudatool.asarray(a), cudatool.asarray(b))
    assert (a + b).shape == actual.shape
    np.testing.assert_array_equal(actual.get(), a + b)


def test_any_strides():
    host = np.arange(2 * 3 * 4 * 8, dtype=np.float32).reshape(2, 3, 4, 8)
    array = cudatool.asarray(host)
    for view in (
        lambda a: a.transpose(3, 1, 0, 2),
        lambda a: a[:, ::-1],
        lambda a: a[..., ::-2],
        lambda a: a[1, :, 2:],
        lambda a: a.transpose(0, 2, 1, 3),
    ):
        np.testing.assert_array_equal(ops.add(view(array), view(array)[0]).get(), view(host) + view(host)[0])
        target = cudatool.asarray(host)
        ops.add(view(array), 1, out=view(target))
        np.testing.assert_array_equal(view(target).get(), view(host) + 1)


def test_too_many_dimensions_are_refused():
    deep = cudatool.zeros((2,) * 9 + (2,) * 9)[(slice(None), 0) * 9]
    with pytest.raises(UsageError, match=r"more than 8 dimensions .* make them contiguous"):
        ops.add(deep, 0)
    deep.fill_(3)
    assert (ops.add(deep.contiguous(), 1).get() == 4).all()


def test_result_goes_to_out_in_its_dtype():
    a = cudatool.asarray(np.array([1, 2, 3], np.int32))
    out = cudatool.zeros(3, np.float16)
    assert out is ops.add(a, a, out=out)
    assert [2, 4, 6] == out.get().tolist()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda: cudatool.zeros(4), "out must be a DeviceArray of shape"),
        (lambda: cudatool.zeros(3, np.int32), "the result is float32, which is not put into an array of int32"),
        (lambda: cudatool.zeros(1).broadcast_to((3,)), "read-only"),
        (lambda: np.zeros(3), "out must be a DeviceArray"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out, message):
    with pytest.raises(UsageError, match=message):
        ops.add(cudatool.zeros(3), 1.5, out=out())


def test_out_may_be_an_operand_or_overlap_one():
    host = np.arange(12, dtype=np.float32)
    array = cudatool.asarray(host)
    ops.add(array, 1, out=array)
    np.testing.assert_array_equal(array.get(), host + 1)
    ops.add(array[:-1], 0, out=array[1:])
    np.testing.assert_array_equal(array.get(), np.r_[1, host[:-1] + 1])
    square = cudatool.asarray(host[:9].reshape(3, 3))
    ops.add(square, square.T, out=square)
    np.testing.assert_array_equal(square.get(), host[:9].reshape(3, 3) + host[:9].reshape(3, 3).T)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: ops.add(a, cudatool.zeros(4)), r"shapes \(3,\) and \(4,\) cannot be broadcast"),
        (lambda a: ops.add(a, np.zeros(3)), "takes DeviceArrays and numbers, not ndarray; copy it with"),
        (lambda a: ops.add(1, 2), "needs at least one DeviceArray"),
        (lambda a: ops.neg(a == a), "neg does not take bool"),
        (lambda a: ops.exp(cudatool.zeros(3, [("x", "f4")])), "the device does not compute with"),
        (lambda a: ops.add(a.to(cudatool.float8_e5m2), a), "no common type: cast the 8-bit float first"),
        (lambda a: ops.clamp(a), "clamp needs min or max"),
        (lambda a: ops.gelu(a, approximate="fast"), "approximate must be one of 'none', 'tanh', not 'fast'"),
        (lambda a: ops.div(a, 2, rounding_mode="up"), "rounding_mode must be one of None, 'trunc', 'floor', not 'up'"),
        (lambda a: ops.tril(a), "takes matrices"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(cudatool.zeros(3))


def test_wrong_arguments_name_those_that_there_are():
    a = cudatool.zeros(3)
    with pytest.raises(TypeError, match=r"add\(input, other, alpha=\) was called with 1 operands, beta"):
        ops.add(a, beta=2)
    with pytest.raises(TypeError, match=r"exp\(input\) was called with 2 operands"):
        ops.exp(a, a)
    np.testing.assert_array_equal(ops.add(input=a, other=a, alpha=2).get(), np.zeros(3))


def test_numbers_take_the_dtype_of_the_array():
    half = cudatool.ones(3, np.float16)
    assert np.float16 == (half + 2.5).dtype
    assert np.float16 == (np.float64(2.5) * half).dtype
    bytes_ = cudatool.full(3, 200, np.uint8)
    assert ([44] * 3, np.uint8) == (ops.add(bytes_, 100).get().tolist(), ops.add(bytes_, 100).dtype)
    assert np.float32 == (bytes_ + 0.5).dtype
    assert np.float32 == ops.exp(bytes_).dtype


def test_half_types_are_computed_in_float32():
    big = cudatool.full(3, 300, np.float16)
    actual = ops.addcmul(big, big, big, value=1e-3)  # 90000 is beyond float16
    np.testing.assert_allclose(actual.get(), 390, rtol=1e-3)


def test_halves_meet_in_float32():
    total = cudatool.ones(3, np.float16) + cudatool.ones(3, cudatool.bfloat16)
    assert ([2, 2, 2], np.float32) == (total.get().tolist(), total.dtype)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_division_rounds_as_asked(mode, dtype):
    a, b = np.array([7, -7, 7, -7, 6], dtype), np.array([2, 2, -2, -2, 3], dtype)
    expected = {None: a / b, "floor": np.floor(a / b), "trunc": np.trunc(a / b)}[mode]
    actual = ops.div(cudatool.asarray(a), cudatool.asarray(b), rounding_mode=mode)
    np.testing.assert_array_equal(actual.get(), expected)
    assert (np.float32 if mode is None else dtype) == actual.dtype


def test_integers_have_powers_and_remainders():
    a, b = np.array([2, -3, 5, -1, 7]), np.array([10, 3, 0, -3, -2])
    np.testing.assert_array_equal(ops.pow(cudatool.asarray(a), cudatool.asarray(b)).get(), [1024, -27, 1, -1, 0])
    d = np.array([3, 3, -3, -3, 2])
    np.testing.assert_array_equal(ops.remainder(cudatool.asarray(a), cudatool.asarray(d)).get(), a % d)
    np.testing.assert_array_equal(ops.fmod(cudatool.asarray(a), cudatool.asarray(d)).get(), np.fmod(a, d))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_shifts_by_too_many_bits_shift_all_out(dtype):
    bits = 8 * np.dtype(dtype).itemsize
    numbers = cudatool.asarray(np.array([5, 100, 1], dtype))
    by = cudatool.asarray(np.array([bits, bits - 1, 1], dtype))
    assert ops.bitwise_left_shift(numbers, by).get().tolist() == [0, 0, 2]
    assert ops.bitwise_right_shift(numbers, by).get().tolist() == [0, 0, 0]
    if np.dtype(dtype).kind == "i":
        assert ops.bitwise_left_shift(numbers, -1).get().tolist() == [0, 0, 0]
        assert ops.bitwise_right_shift(numbers, -1).get().tolist() == [0, 0, 0]
        assert ops.bitwise_right_shift(-numbers, by).get().tolist() == [-1, -1, -1]


def test_whole_numbers_stay_as_they_are():
    host = np.array([2**62 + 1, -3, 0])
    array = cudatool.asarray(host)
    for name in ("floor", "ceil", "round", "trunc"):
        np.testing.assert_array_equal(getattr(ops, name)(array).get(), host)
    assert ops.isfinite(array).get().all() and not ops.isinf(array).get().any()


def test_clamp_between_numbers_or_arrays():
    host = np.array([-2, 0, 1, np.nan, 5], np.float32)
    array = cudatool.asarray(host)
    np.testing.assert_array_equal(ops.clamp(array, -1, 2).get(), np.clip(host, -1, 2))
    np.testing.assert_array_equal(ops.clamp(array, max=cudatool.ones(5)).get(), np.clip(host, None, 1))
    np.testing.assert_array_equal(ops.clamp(array, min=0.5).get(), np.clip(host, 0.5, None))


def test_approximate_gelu_and_its_gradient():
    (x, g), arrays = reals(2)
    x, g = x.astype(np.float64), g.astype(np.float64)

    def approximate(x):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    check(ops.gelu(arrays[0], approximate="tanh"), approximate(x), np.float32)
    check(ops.gelu_backward(arrays[1], arrays[0], "tanh"), g * slope(approximate, x), np.float32)


def test_triangles_of_batches():
    host = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    for diagonal in (-1, 0, 2):
        np.testing.assert_array_equal(ops.tril(cudatool.asarray(host), diagonal).get(), np.tril(host, diagonal))
        np.testing.assert_array_equal(ops.triu(spread(host), diagonal).get(), np.triu(host, diagonal))


def test_nan_wins_extremes_and_no_comparison():
    a, b = cudatool.asarray(np.array([np.nan, 1.0])), cudatool.asarray(np.array([1.0, np.nan]))
    assert np.isnan(ops.maximum(a, b).get()).all() and np.isnan(ops.minimum(a, b).get()).all()
    assert not ops.le(a, b).get().any()
    assert ops.ne(a, a).get().tolist() == ops.isnan(a).get().tolist() == [True, False]


def test_one_kernel_serves_every_rank(events):
    ops.add(spread(np.zeros((3, 4), np.float32)), 0)
    before = sum(event.kind == Kind.MODULE_LOAD for event in events)
    ops.add(spread(np.zeros(5, np.float32)), 0)
    ops.add(spread(np.zeros((2, 3, 2, 2), np.float32)).transpose(3, 1, 2, 0), 0)
    assert before == sum(event.kind == Kind.MODULE_LOAD for event in events)
    launched = [event.name for event in events if event.kind == Kind.KERNEL_LAUNCH]
    assert "add<float, float, 1>" == launched[-1]


def test_operations_are_captured_and_replayed():
    array = cudatool.ones(8)
    ops.exp(ops.add(array, 1))  # compiled before
    graph = cudatool.CUDAGraph()
    with cudatool.graph(graph):
        result = ops.exp(ops.add(array, 1))
    array.fill_(2)
    graph.replay()
    np.testing.assert_allclose(result.get(), np.exp(3), rtol=1e-6)
    del result
    graph.reset()


def test_a_complex_number_is_infinite_if_a_part_is():
    nan, inf = np.nan, np.inf
    z = np.array([3e38 + 3e38j, complex(inf, nan), complex(nan, -inf), complex(nan, 1), 1], np.complex64)
    array = cudatool.asarray(z)
    assert ops.isinf(array).get().tolist() == [False, True, True, False, False]
    assert ops.isfinite(array).get().tolist() == [True, False, False, False, True]


def test_filling_by_a_mask_keeps_the_dtype():
    array = cudatool.asarray(np.array([1, 2, 3], np.int32))
    filled = ops.masked_fill(array, array > 1, 7.5)
    assert filled.dtype == np.int32
    assert filled.get().tolist() == [1, 7, 7]


@pytest.mark.parametrize("bound", [300, -1])
def test_bounds_that_would_wrap_around_are_refused(bound):
    with pytest.raises(UsageError, match="does not hold"):
        ops.clamp(cudatool.zeros(3, np.uint8), bound)


def test_the_square_of_bool_is_an_integer():
    found = ops.square(cudatool.asarray([True, False]))
    assert (found.dtype, found.get().tolist()) == (np.int64, [1, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: ops.add(a, a, alpha=0.5), "alpha must be a number that int32 arithmetic can take, not 0.5"),
        (lambda a: ops.sub(a, 1, alpha=1j), "alpha must be a number that int32"),
        (lambda a: ops.addcmul(a, a, a, value=0.5), "value must be a number that int32"),
        (lambda a: ops.add(a, a, alpha=a), "alpha must be a number"),
        (lambda a: ops.add(a, np.str_("1")), "DeviceArrays and numbers, not str_"),
        (lambda a: ops.tril(a.reshape(1, 3), 1.5), "diagonal must be a number that int64"),
        (lambda a: ops.pow(a, -1), "integers to the power of -1 is not whole"),
        (lambda a: ops.masked_fill(a, a > 0, 2**31), "int32 does not hold 2147483648"),
        (lambda a: ops.masked_fill(a, a > 0, float("nan")), "int32 does not hold nan"),
        (lambda a: ops.masked_fill(a.astype(np.float32), a > 0, 1e300), "float32 does not hold 1e"),
        (lambda a: ops.masked_fill(a.astype(np.float32), a > 0, 1j), "float32 does not hold 1j"),
        (lambda a: a.fill_(2**40), "int32 does not hold 1099511627776"),
        (lambda a: a.fill_("7"), "int32 does not hold '7'"),
        (lambda a: cudatool.full(2, None), "float32 does not hold None"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(cudatool.asarray(np.array([1, 2, 3], np.int32)))


def test_numbers_that_fit_are_rounded_or_cut():
    whole, mask = cudatool.asarray(np.array([1, 2], np.uint8)), cudatool.asarray([False, True])
    assert ops.masked_fill(whole, mask, 3.7).get().tolist() == [1, 3]
    assert whole.fill_(-1).get().tolist() == [255, 255]  # as one subtracts by adding
    assert whole.astype(np.float32).fill_(float("inf")).get().tolist() == [float("inf")] * 2
