"""Products of all kinds, against NumPy."""

from __future__ import annotations

import json
import threading

import ml_dtypes
import numpy as np
import pytest
from blas_cases import exact, values
from warm_process import COMMAND_LINE, run_python

import cudatool
from cudatool import blas
from cudatool.backends._settings import Settings, settings
from cudatool.errors import UsageError
from cudatool.runtime import host_function
from cudatool.trace.events import AccessFlag, Kind, unpack_product

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
TOLERANCE = {"f4": 1e-5, "f8": 1e-12, "f2": 4e-3, BF16: 2e-2, "c8": 1e-5, "c16": 1e-12}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(np.dtype(dtype)))


@pytest.fixture(autouse=True)
def switches():
    """The switches as a program finds them."""
    before = {name: getattr(settings, name) for name in Settings.__slots__}
    yield
    for name, value in before.items():
        setattr(settings, name, value)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def check(expected, found, dtype):
    tolerance = TOLERANCE[dtype]
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_allclose(exact(found.get()), expected, rtol=tolerance, atol=tolerance * 8)


@DTYPES
def test_mm_of_every_dtype(rng, dtype):
    a, b = values(rng, (5, 7), dtype), values(rng, (7, 4), dtype)
    check(exact(a) @ exact(b), blas.mm(cudatool.asarray(a), cudatool.asarray(b)), dtype)


@DTYPES
def test_mm_of_transposed_matrices(rng, dtype):
    a, b = values(rng, (7, 5), dtype), values(rng, (4, 7), dtype)
    check(exact(a).T @ exact(b).T, blas.mm(cudatool.asarray(a).T, cudatool.asarray(b).T), dtype)


@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("which", ["a", "b", "both"])
@pytest.mark.parametrize("transposed", [False, True])
def test_conjugates_are_multiplied(rng, dtype, which, transposed):
    a, b = values(rng, (6, 6), dtype), values(rng, (6, 6), dtype)
    x, y = cudatool.asarray(a), cudatool.asarray(b)
    expected_a, expected_b = exact(a), exact(b)
    if which != "b":
        x, expected_a = blas.conj(x), expected_a.conj()
    if which != "a":
        y, expected_b = blas.conj(y), expected_b.conj()
    if transposed:
        x, y, expected_a, expected_b = x.T, y.T, expected_a.T, expected_b.T
    check(expected_a @ expected_b, blas.mm(x, y), dtype)


def test_the_conjugate_of_a_conjugate_and_of_real_numbers_is_the_array_itself():
    array, real = cudatool.zeros((2, 2), "c8"), cudatool.zeros((2, 2))
    assert blas.conj(blas.conj(array)) is array
    assert blas.conj(real) is real


def test_an_adjoint_is_not_copied(rng, events):
    a = cudatool.asarray(values(rng, (3, 4), "c8"))
    events.clear()
    blas.mm(blas.conj(a).T, a)
    assert [Kind.GEMM] == [event.kind for event in events if event.kind in (Kind.GEMM, Kind.MEMCPY, Kind.KERNEL_LAUNCH)]


@DTYPES
def test_bmm(rng, dtype):
    a, b = values(rng, (3, 5, 7), dtype), values(rng, (3, 7, 4), dtype)
    check(exact(a) @ exact(b), blas.bmm(cudatool.asarray(a), cudatool.asarray(b)), dtype)


def test_bmm_of_heads_that_lie_side_by_side(rng):
    """Attention's views: (batch, position, head, size) as (head, position, size)."""
    q, k = values(rng, (6, 4, 8), "f4"), values(rng, (6, 4, 8), "f4")
    x, y = (cudatool.asarray(array).transpose(1, 0, 2) for array in (q, k))
    expected = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0)
    check(expected, blas.bmm(x, y.transpose(0, 2, 1)), "f4")


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 5)),
        ((2, 3, 4), (4,)),
        ((4,), (2, 4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (3, 4, 5)),
        ((2, 3, 3, 4), (2, 3, 4, 5)),
        ((2, 0, 4), (4, 5)),
        ((0, 3, 4), (0, 4, 5)),
        ((2, 3, 0), (0, 5)),
        ((0,), (0,)),
    ],
)
def test_matmul_has_the_shapes_of_numpy(rng, x, y):
    a, b = values(rng, x, "f8"), values(rng, y, "f8")
    found = cudatool.matmul(cudatool.asarray(a), cudatool.asarray(b))
    assert np.shape(a @ b) == found.shape
    check(a @ b, found, "f8")


def test_matmul_of_a_tall_batch_is_one_product(rng, events):
    a, b = cudatool.asarray(values(rng, (2, 3, 4), "f4")), cudatool.asarray(values(rng, (4, 5), "f4"))
    events.clear()
    cudatool.matmul(a, b)
    (gemm,) = (event for event in events if event.kind is Kind.GEMM)
    assert (gemm.name, unpack_product(gemm.aux0, gemm.aux1)) == ("sgemm", (6, 5, 4))


def test_matmul_of_batches_that_do_not_lie_in_a_row(rng):
    a, b = values(rng, (3, 2, 4, 5), "f4"), values(rng, (2, 3, 5, 6), "f4")
    found = cudatool.empty((2, 6, 4, 3)).transpose(0, 3, 2, 1)
    x, y = cudatool.asarray(a).transpose(1, 0, 2, 3), cudatool.asarray(b)
    assert cudatool.matmul(x, y, out=found) is found
    check(a.transpose(1, 0, 2, 3) @ b, found, "f4")


@DTYPES
def test_mv_and_dot(rng, dtype):
    a, b, c = values(rng, (5, 7), dtype), values(rng, (7,), dtype), values(rng, (7,), dtype)
    x, y, z = (cudatool.asarray(array) for array in (a, b, c))
    check(exact(a) @ exact(b), blas.mv(x, y), dtype)
    found = blas.dot(y, z)
    assert found.shape == ()
    check(exact(b) @ exact(c), found, dtype)
    check(np.vdot(exact(b), exact(c)), blas.vdot(y, z), dtype)


def test_vectors_with_gaps(rng, events):
    a, b = values(rng, (5, 7), "f4"), values(rng, (14,), "f4")
    x, y = cudatool.asarray(a), cudatool.asarray(b)[::2]
    events.clear()
    found = blas.mv(x, y)
    assert [Kind.GEMM] == [event.kind for event in events if event.kind in (Kind.GEMM, Kind.MEMCPY, Kind.KERNEL_LAUNCH)]
    check(a @ b[::2], found, "f4")


@DTYPES
@pytest.mark.parametrize("shape", [(5, 4), (4,), (1, 4), (5, 1), ()])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2)])
def test_addmm(rng, dtype, shape, beta, alpha):
    c, a, b = values(rng, shape, dtype), values(rng, (5, 7), dtype), values(rng, (7, 4), dtype)
    found = blas.addmm(*(cudatool.asarray(array) for array in (c, a, b)), beta=beta, alpha=alpha)
    check(beta * exact(c) + alpha * (exact(a) @ exact(b)), found, dtype)


def test_addmm_does_not_read_what_is_multiplied_with_nothing(rng):
    a, b = values(rng, (5, 7), "f4"), values(rng, (7, 4), "f4")
    found = blas.addmm(cudatool.full((5, 4), np.nan), cudatool.asarray(a), cudatool.asarray(b), beta=0)
    check(a @ b, found, "f4")


def test_complex_factors_are_for_complex_numbers():
    a = cudatool.asarray(np.array([[1 + 2j]], "c8"))
    assert [[2j]] == blas.addmm(a, a, a, beta=0, alpha=2j / (1 + 2j) ** 2).get().round(5).tolist()
    with pytest.raises(UsageError, match="must be real for float32"):
        blas.addmm(cudatool.ones((1, 1)), cudatool.ones((1, 1)), cudatool.ones((1, 1)), alpha=1j)


@pytest.mark.parametrize("name", ["mm", "bmm", "mv", "dot", "matmul", "linear"])
def test_what_is_no_device_array_is_refused(name):
    with pytest.raises(UsageError, match=r"takes device arrays, not list; use cudatool\.asarray"):
        getattr(blas, name)(cudatool.ones((2, 2)), [[1, 2], [3, 4]])


def test_addmm_in_place(rng):
    c, a, b = values(rng, (5, 4), "f8"), values(rng, (5, 7), "f8"), values(rng, (7, 4), "f8")
    whole = cudatool.asarray(c)
    assert blas.addmm(whole, cudatool.asarray(a), cudatool.asarray(b), out=whole) is whole
    check(c + a @ b, whole, "f8")


def test_addmm_into_columns_and_into_steps(rng):
    c, a, b = values(rng, (5, 4), "f8"), values(rng, (5, 7), "f8"), values(rng, (7, 4), "f8")
    x, y, z = (cudatool.asarray(array) for array in (c, a, b))
    for out in (cudatool.empty((4, 5), "f8").T, cudatool.empty((5, 8), "f8")[:, ::2]):
        check(2 * c + a @ b, blas.addmm(x, y, z, beta=2, out=out), "f8")


def test_addmm_over_nothing_is_what_is_added():
    c = np.arange(20.0).reshape(5, 4)
    found = blas.addmm(cudatool.asarray(c), cudatool.zeros((5, 0), "f8"), cudatool.zeros((0, 4), "f8"), beta=2)
    check(2 * c, found, "f8")
    bias = np.arange(4.0)
    found = blas.linear(cudatool.zeros((5, 0), "f8"), cudatool.zeros((4, 0), "f8"), cudatool.asarray(bias))
    check(np.broadcast_to(bias, (5, 4)), found, "f8")


@DTYPES
def test_baddbmm_and_addmv(rng, dtype):
    c, a, b = values(rng, (2, 1, 4), dtype), values(rng, (2, 5, 7), dtype), values(rng, (2, 7, 4), dtype)
    x, y, z = (cudatool.asarray(array) for array in (c, a, b))
    check(0.5 * exact(c) + 2 * (exact(a) @ exact(b)), blas.baddbmm(x, y, z, beta=0.5, alpha=2), dtype)
    v, w = values(rng, (5,), dtype), values(rng, (7,), dtype)
    found = blas.addmv(cudatool.asarray(v), y[0], cudatool.asarray(w), beta=0.5, alpha=2)
    check(0.5 * exact(v) + 2 * (exact(a[0]) @ exact(w)), found, dtype)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rng, shape, with_bias):
    x, w, b = values(rng, shape, "f4"), values(rng, (4, 7), "f4"), values(rng, (4,), "f4")
    found = blas.linear(*(cudatool.asarray(array) for array in ((x, w, b) if with_bias else (x, w))))
    check(x @ w.T + (b if with_bias else 0), found, "f4")


def test_linear_is_one_product_that_adds_the_bias(rng, events):
    x, w, b = (cudatool.asarray(values(rng, shape, "f2")) for shape in ((5, 7), (4, 7), (4,)))
    events.clear()
    blas.linear(x, w, b)
    gemm, *rest = (event for event in events if event.kind in (Kind.GEMM, Kind.MEMCPY, Kind.KERNEL_LAUNCH))
    assert (gemm.name, rest) == ("hgemm_bias", [])
    read = [event.address for event in events if event.kind is Kind.ACCESS and event.flags == AccessFlag.READ]
    assert [x.data_ptr(), w.data_ptr(), b.data_ptr()] == read


def test_what_a_product_adds_to_is_read_and_written(rng, events):
    c = cudatool.zeros((2, 5, 8))[:, :, :4]
    a, b = cudatool.zeros((2, 5, 7)), cudatool.zeros((2, 7, 4))
    events.clear()
    blas.baddbmm(c, a, b, out=c)
    gemm, *_, written = (event for event in events if event.kind in (Kind.GEMM, Kind.ACCESS))
    assert (gemm.name, gemm.address) == ("sgemm_strided_batched", c.data_ptr())
    assert (c.data_ptr(), 16, 32, 10, AccessFlag.READ | AccessFlag.WRITE) == (
        written.address,
        written.size,
        written.aux0,
        written.aux1,
        written.flags,
    )


# Epilogues.


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def slope(function, x):
    return (function(x + 1e-4) - function(x - 1e-4)) / 2e-4


@pytest.mark.parametrize("dtype", ["f4", "f2", BF16])
@pytest.mark.parametrize("use_gelu", [False, True])
@pytest.mark.parametrize("shape", [(16,), (8, 16)])
def test_addmm_activation(rng, dtype, use_gelu, shape):
    c, a, b = values(rng, shape, dtype), values(rng, (8, 24), dtype), values(rng, (24, 16), dtype)
    found = blas.addmm_activation(*(cudatool.asarray(array) for array in (c, a, b)), use_gelu=use_gelu)
    total = exact(c) + exact(a) @ exact(b)
    check(gelu(total) if use_gelu else np.maximum(total, 0), found, dtype)


@pytest.mark.parametrize("dtype", ["f2", BF16])
@pytest.mark.parametrize("columns", [128, 40])
def test_relu_and_its_derivative(rng, dtype, columns):
    x, w, b = values(rng, (16, 24), dtype), values(rng, (24, columns), dtype), values(rng, (columns,), dtype)
    given = [cudatool.asarray(array) for array in (x, w, b)]
    forward = blas.mm_epilogue(given[0], given[1], "relu_aux_bias", bias=given[2])
    total = exact(x) @ exact(w) + exact(b)
    check(np.maximum(total, 0), forward.out, dtype)
    up, w2 = values(rng, (16, 24), dtype), values(rng, (24, columns), dtype)
    back = blas.mm_epilogue(cudatool.asarray(up), cudatool.asarray(w2), "drelu_bgrad", aux=forward.aux)
    expected = (exact(up) @ exact(w2)) * (exact(forward.out.get()) > 0)
    check(expected, back.out, dtype)
    np.testing.assert_allclose(exact(back.bias_gradient.get()), expected.sum(0), rtol=0.05, atol=0.3)
    assert forward.bias_gradient is None
    assert back.aux is None


@pytest.mark.parametrize("dtype", ["f2", BF16])
def test_gelu_and_its_derivative(rng, dtype):
    x, w = values(rng, (16, 24), dtype), values(rng, (24, 40), dtype)
    forward = blas.mm_epilogue(cudatool.asarray(x), cudatool.asarray(w), "gelu_aux")
    total = exact(x) @ exact(w)
    check(gelu(total), forward.out, dtype)
    check(total, forward.aux, dtype)
    up, w2 = values(rng, (16, 24), dtype), values(rng, (24, 40), dtype)
    back = blas.mm_epilogue(cudatool.asarray(up), cudatool.asarray(w2), "dgelu", aux=forward.aux)
    check((exact(up) @ exact(w2)) * slope(gelu, exact(forward.aux.get())), back.out, dtype)


@pytest.mark.parametrize(
    ("epilogue", "options", "message"),
    [
        ("softmax", {}, "there are bias, .* relu"),
        ("bias", {}, "needs bias"),
        ("relu", {"bias": (4,)}, "does not take bias"),
        ("drelu", {}, "needs aux"),
        ("relu_bias", {"bias": (5,)}, "bias must have shape"),
        ("dgelu", {"aux": (3, 4)}, "aux must have shape"),
    ],
)
def test_epilogues_that_lack_something_are_refused(epilogue, options, message):
    arrays = {name: cudatool.zeros(shape) for name, shape in options.items()}
    with pytest.raises(UsageError, match=message):
        blas.mm_epilogue(cudatool.zeros((5, 3)), cudatool.zeros((3, 4)), epilogue, **arrays)


# 8 bits.


def fp8(rng, shape, dtype):
    return rng.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2)], ids=["e4m3", "e4m3 e5m2"])
@pytest.mark.parametrize("out_dtype", ["f4", "f2", BF16])
def test_scaled_mm(rng, types, out_dtype, has_fp8):
    a, b = fp8(rng, (16, 32), types[0]), fp8(rng, (16, 32), types[1])
    scales = cudatool.asarray(np.array([0.5, 4], "f4"))
    found = blas.scaled_mm(cudatool.asarray(a), cudatool.asarray(b).T, scales[:1], scales[1:], out_dtype=out_dtype)
    assert found.dtype == np.dtype(out_dtype)
    # Tensor cores keep some 14 bits of a sum of 8-bit products.
    np.testing.assert_allclose(exact(found.get()), 2 * (exact(a) @ exact(b).T), rtol=1e-2, atol=2e-2)


def test_scaled_mm_copies_what_is_in_the_other_order(rng, has_fp8):
    a, b, one = fp8(rng, (16, 32), E4M3), fp8(rng, (32, 16), E4M3), cudatool.ones((1,))
    found = blas.scaled_mm(cudatool.asarray(a), cudatool.asarray(b), one, one)
    check(exact(a) @ exact(b), found, BF16)


def test_scaled_mm_with_a_bias_and_a_result_of_eight_bits(rng, has_fp8):
    a, b, bias = fp8(rng, (16, 32), E4M3), fp8(rng, (16, 32), E4M3), values(rng, (16,), BF16)
    one, scale = cudatool.ones((1,)), cudatool.full((1,), 0.25)
    x, y = cudatool.asarray(a), cudatool.asarray(b).T
    found = blas.scaled_mm(x, y, one, one, bias=cudatool.asarray(bias), scale_result=scale, out_dtype=E4M3)
    expected = (exact(a) @ exact(b).T + exact(bias)) / 4
    np.testing.assert_allclose(exact(found.get()), expected, rtol=0.07, atol=0.02)


def test_results_beyond_eight_bits_are_the_largest(has_fp8):
    a, one = cudatool.asarray(np.full((16, 16), 448, E4M3)), cudatool.ones((1,))
    found = blas.scaled_mm(a, a.T, one, one, scale_result=one, out_dtype=E4M3)
    assert {448.0} == set(found.get().astype("f4").ravel().tolist())


@pytest.fixture
def has_fp8(device):
    if device == "cuda" and cudatool.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floating point")


@pytest.mark.parametrize(
    ("shapes", "dtypes", "options", "message"),
    [
        (((16, 32), (32, 16)), ("f4", "f4"), {}, "takes float8"),
        (((16, 32), (32, 16)), (E5M2, E5M2), {}, "at most one"),
        (((16, 24), (24, 16)), (E4M3, E4M3), {}, "multiples of 16"),
        (((16, 32), (32, 16)), (E4M3, E4M3), {"out_dtype": "f8"}, "not float64"),
        (((16, 32), (32, 16)), (E4M3, E4M3), {"scale_a": 1.0}, "a scale is an array"),
    ],
)
def test_scaled_mm_refuses_what_does_not_fit(shapes, dtypes, options, message):
    a, b = (cudatool.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    with pytest.raises(UsageError, match=message):
        blas.scaled_mm(a, b, **{"scale_a": cudatool.ones((1,)), "scale_b": cudatool.ones((1,)), **options})


def test_int_mm(rng):
    a, b = rng.integers(-128, 128, (32, 64)).astype("i1"), rng.integers(-128, 128, (64, 16)).astype("i1")
    found = blas.int_mm(cudatool.asarray(a), cudatool.asarray(b))
    np.testing.assert_array_equal(a.astype("i4") @ b.astype("i4"), found.get())


# Precision.


def test_tf32_rounds_the_inputs(rng):
    a, b = values(rng, (32, 256), "f4"), values(rng, (256, 32), "f4")
    x, y = cudatool.asarray(a), cudatool.asarray(b)
    expected = exact(a) @ exact(b)
    cudatool.backends.cuda.matmul.allow_tf32 = True
    coarse = np.abs(blas.mm(x, y).get() - expected).max()
    cudatool.backends.cuda.matmul.allow_tf32 = False
    fine = np.abs(blas.mm(x, y).get() - expected).max()
    assert fine < 1e-4 < coarse < 0.1


def test_the_switches_of_float32_are_one():
    matmul = cudatool.backends.cuda.matmul
    assert ("highest", False, "ieee") == (cudatool.get_float32_matmul_precision(), matmul.allow_tf32, "ieee")
    cudatool.set_float32_matmul_precision("medium")
    assert matmul.allow_tf32
    assert "tf32" == matmul.fp32_precision
    matmul.allow_tf32 = True
    assert "high" == cudatool.get_float32_matmul_precision()
    matmul.fp32_precision = "ieee"
    assert "highest" == cudatool.get_float32_matmul_precision()


def test_switches_refuse_what_they_do_not_know():
    matmul = cudatool.backends.cuda.matmul
    with pytest.raises(UsageError, match="True or False"):
        matmul.allow_tf32 = 1
    with pytest.raises(UsageError, match="highest, high, medium"):
        cudatool.set_float32_matmul_precision("low")
    with pytest.raises(UsageError, match="default, cublas, cublaslt"):
        cudatool.backends.cuda.preferred_blas_library("magma")
    with pytest.raises(AttributeError):
        matmul.allow_tf23 = True


@pytest.mark.parametrize("library", ["cublas", "cublaslt"])
@DTYPES
def test_both_libraries_give_the_same_product(rng, library, dtype):
    assert library == cudatool.backends.cuda.preferred_blas_library(library)
    a, b = values(rng, (3, 16, 32), dtype), values(rng, (3, 32, 24), dtype)
    check(exact(a) @ exact(b), blas.bmm(cudatool.asarray(a), cudatool.asarray(b)), dtype)


@pytest.mark.parametrize("dtype", ["f2", BF16])
def test_reductions_can_be_kept_in_full_precision(rng, dtype):
    matmul = cudatool.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    a, b = values(rng, (16, 64), dtype), values(rng, (64, 16), dtype)
    check(exact(a) @ exact(b), blas.mm(cudatool.asarray(a), cudatool.asarray(b)), dtype)


# Streams, graphs, threads.


def captured(stream):
    """Capture what is enqueued inside, with the driver alone, and return a function that launches it."""
    driver = cudatool.runtime.calls.driver
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

    class Captured:
        def __enter__(self):
            cudatool.runtime.calls.check(driver.cuStreamBeginCapture(stream.cuda_stream, mode))
            return self

        def __exit__(self, *_):
            graph = cudatool.runtime.calls.check(driver.cuStreamEndCapture(stream.cuda_stream))
            self.executable = cudatool.runtime.calls.check(driver.cuGraphInstantiate(graph, 0))
            cudatool.runtime.calls.check(driver.cuGraphDestroy(graph))

        def launch(self):
            cudatool.runtime.calls.check(driver.cuGraphLaunch(self.executable, stream.cuda_stream))

        def destroy(self):
            cudatool.runtime.calls.check(driver.cuGraphExecDestroy(self.executable))

    return Captured()


def test_a_captured_product_is_computed_at_each_launch(rng):
    a, b = values(rng, (8, 8), "f4"), values(rng, (8, 8), "f4")
    stream = cudatool.Stream()
    with cudatool.stream(stream):
        x, y, out = cudatool.asarray(a), cudatool.asarray(b), cudatool.empty((8, 8))
        blas.mm(x, y, out=out)  # cuBLAS loads its kernels
        stream.synchronize()
        with captured(stream) as graph:
            blas.mm(x, y, out=out)
            blas.mm(out, y, out=x)
        expected = a
        for _ in range(3):
            out.fill_(0)
            graph.launch()
            expected = expected @ b @ b
            np.testing.assert_allclose(expected, x.get(), rtol=1e-4, atol=1e-3)
        stream.synchronize()
    graph.destroy()


def test_nothing_of_a_captured_product_outlives_its_graph(device):
    if device == "cuda":
        pytest.skip("products on a GPU are not functions of the host")
    stream = cudatool.Stream()
    with cudatool.stream(stream):
        x, out = cudatool.zeros((4, 4)), cudatool.empty((4, 4))
        before = len(host_function._captured)
        with captured(stream) as graph:
            blas.mm(x, x, out=out)
        assert before + 1 == len(host_function._captured)
        graph.launch()
        stream.synchronize()
        assert before + 1 == len(host_function._captured)
        graph.destroy()
        assert before == len(host_function._captured)
        blas.mm(x, x, out=out)
        stream.synchronize()
        assert {} == host_function._once


RACE = """
import cudatool
a, out = cudatool.ones((8, 8)), cudatool.empty((8, 8))
cudatool.synchronize()
graph, other = cudatool.CUDAGraph(), cudatool.Stream()
with cudatool.graph(graph):
    cudatool.blas.mm(a, a, out=out)
graph.replay()
if ORDERED:
    other.wait_stream(cudatool.current_stream())
with cudatool.stream(other):
    copy = out.clone()
cudatool.synchronize()
"""


@pytest.mark.parametrize("ordered", [False, True])
def test_a_race_with_a_captured_product_is_found(tmp_path, ordered):
    (tmp_path / "program.py").write_text(RACE.replace("ORDERED", str(ordered)))
    done = run_python(COMMAND_LINE, "sanitize", "--device", "sim", "--json", "program.py", folder=tmp_path)
    findings = json.loads(done.stdout)["findings"]
    assert ([] if ordered else ["race-raw"]) == [finding["kind"] for finding in findings]


def test_products_of_two_threads(rng):
    a = values(rng, (4, 64, 64), "f4")
    found = {}

    def work(index):
        with cudatool.stream(cudatool.Stream()):
            x = cudatool.asarray(a[index])
            product = x
            for _ in range(3):
                product = blas.linear(product, x, x[0])
            found[index] = product.get()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, product in found.items():
        expected = exact(a[index])
        for _ in range(3):
            expected = expected @ exact(a[index]).T + exact(a[index][0])
        np.testing.assert_allclose(product, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    assert 4 == len(found)


def test_infinities_give_nan_without_a_word() -> None:
    found = blas.mm(cudatool.full((2, 2), np.inf), cudatool.zeros((2, 2)))
    assert np.all(np.isnan(found.get()))


def _scaled(mat2_device=0, **devices):
    one = cudatool.ones((), device=devices.pop("scale", 0))
    bias = cudatool.ones((16,), BF16, device=devices.pop("bias", 0))
    a, b = (cudatool.ones((16, 16), device=where).astype(E4M3) for where in (0, mat2_device))
    return blas.scaled_mm(a, b.T, one, cudatool.ones(()), bias=bias)


@pytest.mark.parametrize(
    "product",
    [
        lambda a, other: blas.addmm(other[0], a, a),
        lambda a, other: blas.linear(a, a, other[0]),
        lambda a, other: blas.addmv(other[0], a, a[0]),
        lambda a, other: blas.mm_epilogue(a, a, "bias", bias=other[0]),
        lambda a, other: blas.mm_epilogue(a, a, "drelu", aux=cudatool.zeros((16, 16), np.uint8, device=other.device)),
        lambda a, other: blas.int_mm(a.astype("i1"), other.astype("i1")),
        lambda a, other: _scaled(mat2_device=other.device),
        lambda a, other: _scaled(scale=other.device),
        lambda a, other: _scaled(bias=other.device),
    ],
)
def test_arrays_of_two_devices_are_refused(second, product):
    with pytest.raises(UsageError, match="on device"):
        product(cudatool.ones((16, 16)), cudatool.ones((16, 16), device=second))


@pytest.mark.parametrize(
    "product",
    [
        lambda a, out: blas.mm(a, a, out=out),
        lambda a, out: blas.addmm(a[0], a, a, out=out),
        lambda a, out: blas.matmul(a, a, out=out),
        lambda a, out: blas.mv(a, a[0], out=out[0]),
        lambda a, out: blas.addmm_activation(a[0], a, a, out=out),
    ],
)
def test_products_are_not_written_to_what_is_read_only(product):
    a, kept = cudatool.ones((4, 4)), cudatool.zeros((4, 4))
    for _ in range(2):  # with a plan, too
        with pytest.raises(UsageError, match="out is read-only"):
            product(a, kept.broadcast_to((4, 4)))
    assert not kept.get().any()
