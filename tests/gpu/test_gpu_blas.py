"""Products beside PyTorch's, on a GPU: values, epilogues, 8 bits, workspaces, switches."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import blas
from cudatool.blas import _workspace
from cudatool.errors import UsageError

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

BF16, E4M3, E5M2 = (np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))
TORCH = {
    # dtype -> PyTorch's, and a type of the same size that both know
    np.dtype("f4"): (torch.float32, None),
    np.dtype("f8"): (torch.float64, None),
    np.dtype("f2"): (torch.float16, None),
    np.dtype("c8"): (torch.complex64, None),
    np.dtype("c16"): (torch.complex128, None),
    np.dtype("i1"): (torch.int8, None),
    np.dtype("i4"): (torch.int32, None),
    BF16: (torch.bfloat16, np.int16),
    E4M3: (torch.float8_e4m3fn, np.uint8),
    E5M2: (torch.float8_e5m2, np.uint8),
}
TOLERANCE = {"f4": 1e-5, "f8": 1e-13, "f2": 2e-3, BF16: 1.6e-2, "c8": 1e-5, "c16": 1e-13}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(np.dtype(dtype)))


@pytest.fixture(autouse=True)
def gpu():
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    yield
    cudatool.set_float32_matmul_precision("highest")
    cudatool.backends.cuda.preferred_blas_library("default")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def rng():
    return np.random.default_rng(9)


def values(rng, shape, dtype):
    found = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * rng.normal(size=shape)
    return found.astype(dtype)


def on_torch(host):
    dtype, word = TORCH[host.dtype]
    tensor = torch.from_numpy(np.ascontiguousarray(host if word is None else host.view(word))).cuda()
    return tensor if word is None else tensor.view(dtype)


def both(host):
    return cudatool.asarray(host), on_torch(host)


def check(expected, found, tolerance):
    assert TORCH[found.dtype][0] == expected.dtype
    wide = torch.complex128 if expected.is_complex() else torch.float64
    host = found.get()
    exact = host.astype("c16" if expected.is_complex() else "f8")
    np.testing.assert_allclose(exact, expected.to(wide).cpu().numpy(), rtol=tolerance, atol=tolerance * 30)


VIEWS = {
    "rows": lambda a: a,
    "columns": lambda a: a.swapaxes(-1, -2),
    "part": lambda a: a[..., 16:, 8:],
    "steps": lambda a: a[..., ::2],
}


def view(array, how):
    if how == "columns" and isinstance(array, cudatool.DeviceArray):
        return array.transpose(*range(array.ndim - 2), -1, -2)
    return VIEWS[how](array)


@DTYPES
@pytest.mark.parametrize("left", VIEWS)
@pytest.mark.parametrize("right", VIEWS)
def test_mm_of_any_strides(rng, dtype, left, right):
    (a, x), (b, y) = both(values(rng, (256, 256), dtype)), both(values(rng, (256, 256), dtype))
    a, x, b, y = view(a, left), view(x, left), view(b, right), view(y, right)
    k = min(a.shape[1], b.shape[0])
    check(torch.mm(x[:, :k], y[:k]), blas.mm(a[:, :k], b[:k]), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("how", ["conj rows", "adjoint", "both"])
def test_conjugates(rng, dtype, how):
    (a, x), (b, y) = both(values(rng, (3, 64, 64), dtype)), both(values(rng, (3, 64, 64), dtype))
    a, x = blas.conj(a), x.conj()
    if how != "conj rows":
        a, x = a.transpose(0, 2, 1), x.mT
    if how == "both":
        b, y = blas.conj(b), y.conj()
    check(torch.bmm(x, y), blas.bmm(a, b), TOLERANCE[dtype])


@DTYPES
def test_sums_of_all_kinds(rng, dtype):
    tolerance = TOLERANCE[dtype]
    (a, x), (b, y) = both(values(rng, (4, 96, 80), dtype)), both(values(rng, (4, 80, 112), dtype))
    (c, z), (d, w) = both(values(rng, (4, 1, 112), dtype)), both(values(rng, (80,), dtype))
    check(torch.baddbmm(z, x, y, beta=0.5, alpha=2), blas.baddbmm(c, a, b, beta=0.5, alpha=2), tolerance)
    check(torch.addmm(z[0], x[0], y[0]), blas.addmm(c[0], a[0], b[0]), tolerance)
    check(torch.addmm(z[:, 0, :1], x[0, :4], y[0], beta=2), blas.addmm(c[:, 0, :1], a[0, :4], b[0], beta=2), tolerance)
    check(torch.mv(x[0], w), blas.mv(a[0], d), tolerance)
    check(torch.addmv(z[0, 0, :96], x[0], w, beta=3), blas.addmv(c[0, 0, :96], a[0], d, beta=3), tolerance)
    check(torch.dot(w, w), blas.dot(d, d), tolerance)
    check(torch.vdot(w, w), blas.vdot(d, d), tolerance)
    check(torch.matmul(x[:, None], y[0]), cudatool.matmul(a[:, None], b[0]), tolerance)


@pytest.mark.parametrize("dtype", ["f4", "f2", BF16], ids=str)
@pytest.mark.parametrize("library", ["default", "cublaslt"])
def test_linear_and_activations(rng, dtype, library):
    cudatool.backends.cuda.preferred_blas_library(library)
    tolerance = TOLERANCE[dtype]
    (a, x), (b, y), (c, z) = (both(values(rng, shape, dtype)) for shape in ((2, 48, 64), (96, 64), (96,)))
    check(torch.nn.functional.linear(x, y, z), blas.linear(a, b, c), tolerance)
    for use_gelu in (False, True):
        expected = torch._addmm_activation(z, x[0], y.T, use_gelu=use_gelu)
        check(expected, blas.addmm_activation(c, a[0], b.T, use_gelu=use_gelu), tolerance)


@pytest.mark.parametrize("dtype", ["f2", BF16], ids=str)
@pytest.mark.parametrize("columns", [96, 100])
def test_epilogues_of_the_backward_pass(rng, dtype, columns):
    (a, x), (b, y), (c, z) = (both(values(rng, shape, dtype)) for shape in ((64, 72), (72, columns), (columns,)))
    total = torch.addmm(z, x, y).double()
    relu = blas.mm_epilogue(a, b, "relu_aux_bias", bias=c)
    check(total.relu().to(z.dtype), relu.out, TOLERANCE[dtype])
    (g, u), (v, w) = both(values(rng, (64, 72), dtype)), both(values(rng, (72, columns), dtype))
    back = blas.mm_epilogue(g, v, "drelu_bgrad", aux=relu.aux)
    expected = torch.mm(u, w).double() * on_torch(relu.out.get()).bool()
    check(expected.to(z.dtype), back.out, TOLERANCE[dtype])
    np.testing.assert_allclose(back.bias_gradient.get().astype("f8"), expected.sum(0).cpu(), rtol=0.03, atol=0.3)
    gelu = blas.mm_epilogue(a, b, "gelu_aux_bias", bias=c)
    check(total.to(z.dtype), gelu.aux, TOLERANCE[dtype])
    stored = on_torch(gelu.aux.get()).double().requires_grad_()
    torch.nn.functional.gelu(stored, approximate="tanh").backward(torch.mm(u, w).double())
    found = blas.mm_epilogue(g, v, "dgelu", aux=gelu.aux)
    check(stored.grad.to(z.dtype), found.out, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, np.dtype("f2"), np.dtype("f4"), E4M3], ids=str)
def test_eight_bits(rng, types, out_dtype):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floating point")
    (a, x), (b, y) = both(values(rng, (64, 96), types[0])), both(values(rng, (48, 96), types[1]))
    (s, u), (t, v) = (both(np.array([factor], "f4")) for factor in (0.25, 2))
    expected = torch._scaled_mm(x, y.T, u[0], v[0], out_dtype=TORCH[out_dtype][0])
    check(expected, blas.scaled_mm(a, b.T, s, t, out_dtype=out_dtype), 0.13 if out_dtype == E4M3 else 1e-2)
    if out_dtype == E4M3:
        half = blas.scaled_mm(a, b.T, s, t, out_dtype=out_dtype, scale_result=cudatool.full((1,), 0.5))
        np.testing.assert_allclose(2 * half.get().astype("f8"), expected.double().cpu(), rtol=0.13, atol=0.02)


def test_integers(rng):
    (a, x), (b, y) = (both(rng.integers(-128, 128, shape).astype("i1")) for shape in ((64, 96), (96, 48)))
    np.testing.assert_array_equal(torch._int_mm(x, y).cpu().numpy(), blas.int_mm(a, b).get())


def test_tf32_is_torchs(rng):
    (a, x), (b, y) = both(values(rng, (512, 512), "f4")), both(values(rng, (512, 512), "f4"))
    cudatool.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    check(torch.mm(x, y), blas.mm(a, b), 1e-4)
    coarse = np.abs(blas.mm(a, b).get() - a.get().astype("f8") @ b.get().astype("f8")).max()
    assert 1e-3 < coarse < 0.3


def grown(call, allocated):
    before = allocated()
    found = call()
    return allocated() - before, found


def test_the_workspace_is_as_large_as_torchs(rng):
    blas.clear_workspaces()
    torch._C._cuda_clearCublasWorkspaces()
    (a, x), out, other = both(values(rng, (64, 64), "f4")), cudatool.empty((64, 64)), torch.empty(64, 64, device="cuda")
    theirs, _ = grown(lambda: torch.mm(x, x, out=other), torch.cuda.memory_allocated)
    ours, _ = grown(lambda: blas.mm(a, a, out=out), cudatool.memory_allocated)
    assert theirs == ours > 0
    assert (0, out) == grown(lambda: blas.mm(a, a, out=out), cudatool.memory_allocated)
    blas.clear_workspaces()
    again, _ = grown(lambda: blas.addmm(out[0].clone(), a, a, out=out), cudatool.memory_allocated)
    assert ours <= again <= ours + 512
    np.testing.assert_allclose(blas.mm(a, a).get(), torch.mm(x, x).cpu().numpy(), rtol=1e-5, atol=1e-4)


def test_each_stream_has_a_workspace_of_its_own(rng):
    blas.clear_workspaces()
    a = cudatool.asarray(values(rng, (64, 64), "f4"))
    blas.mm(a, a)
    with cudatool.stream(cudatool.Stream()):
        blas.mm(a, a)
    assert 2 == len(_workspace._blocks)
    assert 2 == len({memory.address for memory in _workspace._blocks.values()})
    blas.mm(a, a)
    assert 2 == len(_workspace._blocks)
    cudatool.synchronize()


def test_the_size_of_the_workspace_is_set_by_the_environment():
    program = (
        "import cudatool, cudatool.blas as blas\n"
        "a = cudatool.ones((64, 64)); out = cudatool.empty((64, 64)); before = cudatool.memory_allocated()\n"
        "blas.mm(a, a, out=out); print(cudatool.memory_allocated() - before)\n"
        "cudatool.use_deterministic_algorithms(True); blas.mm(a, a, out=out)"
    )
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (0, "33554432") == (done.returncode, done.stdout.strip()), done.stderr
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:2:16:8"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (1, str((4096 * 2 + 16 * 8) * 1024)) == (done.returncode, done.stdout.strip())
    assert "CUBLAS_WORKSPACE_CONFIG to :4096:8" in done.stderr


def test_a_product_that_cublaslt_does_not_have_says_so():
    a, one = cudatool.empty((17, 32), E4M3), cudatool.ones((1,))
    misplaced = cudatool.empty((16 * 32 + 1,), E4M3)[1:].reshape(16, 32)
    with pytest.raises(UsageError, match="no algorithm"):
        blas.scaled_mm(a, misplaced.T, one, one)


@pytest.mark.parametrize("dtype", ["f4", BF16], ids=str)
def test_products_like_one_before_are_torchs(rng, dtype):
    tolerance = TOLERANCE[dtype]
    stream = cudatool.Stream()
    for turn in range(4):
        (a, x), (b, y), (c, z) = (both(values(rng, shape, dtype)) for shape in ((64, 48), (80, 48), (80,)))
        check(torch.mm(x, y.T), blas.mm(a, b.T), tolerance)
        check(torch.nn.functional.linear(x, y, z), blas.linear(a, b, c), tolerance)
        deep = a.reshape(4, 16, 48)
        check(torch.nn.functional.linear(x, y, z).reshape(4, 16, 80), blas.linear(deep, b, c), tolerance)
        if turn == 2:
            cudatool.synchronize()
            with cudatool.stream(stream):
                check(torch.mm(x, y.T), blas.mm(a, b.T), tolerance)
                check(torch.nn.functional.linear(x, y, z), blas.linear(a, b, c), tolerance)
                stream.synchronize()
