"""Functions of complex numbers, against NumPy in double precision."""

from __future__ import annotations

import numpy as np
import pytest

import cudatool
from cudatool import ops
from cudatool.errors import UsageError

Z = np.array([1 + 2j, -1.5 + 0.25j, 0.5 - 3j, -0.01 - 0.02j, 2 + 0j, 3j, -2 + 0j, -2j])
FUNCTIONS = {
    "cos": np.cos,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "reciprocal": np.reciprocal,
    "rsqrt": lambda z: 1 / np.sqrt(z),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_analysis(name):
    found = getattr(ops, name)(cudatool.asarray(Z))
    assert found.dtype == np.complex128
    np.testing.assert_allclose(found.get(), FUNCTIONS[name](Z), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sqrt", 3e30 - 4e30j, 2e15 - 1e15j),  # the squares overflow
        ("sqrt", complex(-4, -0.0), -2j),  # just below the cut
        ("log", 3e30 - 4e30j, np.log(5e30) - 0.9272952180016122j),
        ("log1p", 1e-10j, 5e-21 + 1e-10j),
        ("expm1", 1e-10 + 1e-10j, 1e-10 + 1e-10j),
        ("tanh", -200 + 1j, -1),
        ("exp", complex(-np.inf, np.inf), 0),
        ("sqrt", complex(0, np.inf), complex(np.inf, np.inf)),
    ],
)
def test_functions_keep_what_is_very_large_or_small(name, value, expected):
    found = getattr(ops, name)(cudatool.asarray(np.array([value], np.complex64)))
    np.testing.assert_allclose(found.get(), np.array([expected], np.complex64), rtol=1e-6)


def test_powers():
    z, real = cudatool.asarray(Z), 1 + abs(Z.real)
    np.testing.assert_allclose(ops.pow(z, z).get(), Z**Z, rtol=1e-12)
    np.testing.assert_allclose((z**2).get(), Z * Z, rtol=1e-15)
    np.testing.assert_allclose((2**z).get(), 2**Z, rtol=1e-12)
    np.testing.assert_allclose(ops.pow(cudatool.asarray(real), 1j).get(), real**1j, rtol=1e-12)
    zero = cudatool.asarray(np.zeros(1, np.complex64))
    assert (zero**0).item() == 1
    assert (zero**2.5).item() == 0
    assert np.isnan((zero**-1j).item())


@pytest.mark.parametrize("correction", [0, 1])
def test_variance_is_that_of_both_parts(correction):
    z = cudatool.asarray(Z.reshape(2, 4).astype(np.complex64))
    found = ops.var(z, 1, correction=correction)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.get(), Z.reshape(2, 4).var(1, ddof=correction), rtol=1e-5)
    np.testing.assert_allclose(ops.std(z, correction=correction).item(), Z.std(ddof=correction), rtol=1e-5)


def test_logsumexp():
    z = cudatool.asarray(Z.reshape(2, 4))
    np.testing.assert_allclose(ops.logsumexp(z, 0).get(), np.log(np.exp(Z.reshape(2, 4)).sum(0)), rtol=1e-13)
    large = cudatool.asarray(np.array([1000 + 1j, 1000 - 1j]))
    np.testing.assert_allclose(ops.logsumexp(large, 0).item(), 1000 + np.log(2 * np.cos(1)), rtol=1e-13)


def test_lerp():
    z, end = cudatool.asarray(Z), cudatool.asarray(2 * Z)
    np.testing.assert_allclose(ops.lerp(z, end, 0.25).get(), 1.25 * Z, rtol=1e-15)
    np.testing.assert_allclose(ops.lerp(z, end, 0.75).get(), 1.75 * Z, rtol=1e-15)


def test_a_factor_of_one_leaves_infinity_alone():
    one, infinite = np.ones(1, np.complex64), np.array([np.inf + 0j], np.complex64)
    a, b = cudatool.asarray(one), cudatool.asarray(infinite)
    assert (a + b).item() == complex(np.inf, 0)
    assert (a - b).item() == complex(-np.inf, 0)


def test_a_norm_is_complex_of_complex_numbers_only():
    with pytest.raises(UsageError, match="its dtype must be complex for complex numbers only"):
        ops.norm(cudatool.asarray(Z), dtype=np.float32)
