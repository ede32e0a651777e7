"""Python's operators and torch's methods on arrays."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import cudatool
from cudatool.errors import UsageError

A, B = np.array([[7, -2, 5], [1, 0, 9]]), np.array([3, -2, 4])
BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", BINARY)
def test_binary_operators(name):
    function = getattr(operator, name)
    a, b = cudatool.asarray(A), cudatool.asarray(B)
    np.testing.assert_allclose(function(a, b).get(), function(A, B), rtol=1e-7)
    np.testing.assert_allclose(function(a, 2).get(), function(A, 2), rtol=1e-7)
    np.testing.assert_allclose(function(12, b).get(), function(12, B), rtol=1e-7)


def test_unary_operators_and_powers():
    a = cudatool.asarray(A)
    np.testing.assert_array_equal((-a).get(), -A)
    np.testing.assert_array_equal(abs(a).get(), abs(A))
    np.testing.assert_array_equal((~a).get(), ~A)
    np.testing.assert_array_equal((a**2).get(), A**2)
    np.testing.assert_array_equal((2 ** abs(a)).get(), 2 ** abs(A))
    np.testing.assert_array_equal((a << 1).get(), A << 1)
    np.testing.assert_array_equal((a >> 1).get(), A >> 1)
    np.testing.assert_array_equal((3 << abs(a)).get(), 3 << abs(A))
    np.testing.assert_array_equal((300 >> abs(a)).get(), 300 >> abs(A))


def test_operators_in_place_keep_the_array():
    array = cudatool.asarray(A.astype(np.float32))
    view, address, expected = array[:, 1:], array.data_ptr(), A.astype(np.float32)
    for function, value in (
        ("iadd", 2),
        ("imul", 3),
        ("isub", 1),
        ("itruediv", 2),
        ("ipow", 2),
        ("imod", 5),
        ("ifloordiv", 2),
    ):
        view = getattr(operator, function)(view, value)
        expected[:, 1:] = getattr(operator, function)(expected[:, 1:], value)
    np.testing.assert_allclose(array.get(), expected)
    assert address == array.data_ptr()


def test_shifts_in_place():
    array = view = cudatool.asarray([1, 2, 3])
    view <<= 2
    view >>= 1
    assert view is array
    assert array.get().tolist() == [2, 4, 6]


def test_an_integer_array_does_not_become_real_in_place():
    array = cudatool.asarray(A)
    with pytest.raises(UsageError, match="the result is float32, which is not put into an array of int64"):
        array /= 2


def test_matrix_product():
    a = cudatool.asarray(A.astype(np.float32))
    np.testing.assert_allclose((a @ a.T).get(), A @ A.T)


@pytest.mark.parametrize("function", [operator.add, lambda a, b: b + a, operator.matmul, operator.eq, operator.iadd])
def test_host_arrays_are_not_mixed_in(function):
    with pytest.raises((UsageError, TypeError), match=r"asarray|numpy|ndarray"):
        function(cudatool.asarray(A), A)


def test_numpy_functions_refuse_arrays():
    with pytest.raises(TypeError, match="does not support ufuncs"):
        np.exp(cudatool.asarray(A))


def test_what_is_no_number_is_left_to_python():
    array = cudatool.asarray(A)
    with pytest.raises(TypeError, match="unsupported operand"):
        array + "1"
    assert (array == None) is False  # noqa: E711
    assert (array != "x") is True


def test_one_element_is_a_python_number():
    array = cudatool.asarray(A)
    assert (7, 7.0, 7) == (array[0, 0].item(), float(array[0, 0]), int(array[:1, :1]))
    assert isinstance(array[0, 0].item(), int)
    assert bool(array[0, 0] > 0) and not array[0, 0] < 0
    with pytest.raises(UsageError, match=r"shape \(2, 3\) is not one number; use all\(\), any\(\)"):
        bool(array == array)


def test_arrays_are_keys_by_identity():
    array = cudatool.asarray(A)
    assert {array: 1}[array] == 1
    assert array not in {array.clone(): 1}


def test_methods():
    host = A.astype(np.float64)
    array = cudatool.asarray(host)
    assert host.sum() == array.sum().item()
    np.testing.assert_array_equal(array.mean(1).get(), host.mean(1))
    np.testing.assert_array_equal(array.max(0).indices.get(), host.argmax(0))
    np.testing.assert_allclose(array.softmax(-1).get().sum(-1), [1, 1])
    np.testing.assert_array_equal(array.clamp(0, 5).get(), host.clip(0, 5))
    np.testing.assert_array_equal(array.tril().get(), np.tril(host))
    assert "cudatool.ops.exp" in cudatool.DeviceArray.exp.__doc__


def test_methods_in_place_return_the_array():
    host = abs(A).astype(np.float32) + 1
    array = cudatool.asarray(host)
    assert array is array.sqrt_()
    assert array is array.add_(1, alpha=2)
    np.testing.assert_allclose(array.get(), np.sqrt(host) + 2, rtol=1e-6)
    assert array is array.masked_fill_(array > 4, 0)
    assert array is array.zero_()
    assert not array.get().any()


def test_to_and_astype():
    array = cudatool.asarray(A.astype(np.float32))
    assert array is array.to(np.float32) is array.astype("float32") is array.to(device=0)
    half = array.to(cudatool.bfloat16)
    np.testing.assert_array_equal(half.get().astype(int), A)
    copy = array.to(np.float32, copy=True)
    assert copy.data_ptr() != array.data_ptr()


def test_layers_see_operators():
    seen = []

    def note(op, args, kwargs):
        seen.append(op.name)
        return op.redispatch(*args, **kwargs)

    array = cudatool.asarray(A.astype(np.float32))
    with cudatool.ops.layer(note):
        array += (array * 2).sum()
    assert ["cudatool.ops.mul", "cudatool.ops.sum", "cudatool.ops.add"] == seen
