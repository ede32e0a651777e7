"""Products by Triton's kernel, on devices of both kinds; Triton must be installed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import backends, blas
from cudatool.blas import _gemm
from cudatool.trace.events import Kind
from cudatool.tunable import _candidates, _triton

pytest.importorskip("triton", reason="needs Triton")


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    """Every product by the candidate of this name."""

    def use(name):
        def compute(gemm, stream):
            assert name in [found for found, _ in _candidates.candidates(gemm, stream)]
            _candidates.candidate(name, gemm)(gemm, stream)
            return True

        monkeypatch.setattr(_gemm, "tuner", compute)

    return use


@pytest.mark.some_of("name", list(_triton.TILES), 1)  # Triton takes seconds to compile each
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_products_are_those_of_numpy(by_triton, name, dtype):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 45, 70)).astype(dtype), rng.normal(size=(2, 33, 70)).astype(dtype)
    by_triton(name)
    found = blas.bmm(cudatool.asarray(a), cudatool.asarray(b).transpose(0, 2, 1)).get()
    expected = a.astype(np.float64) @ b.astype(np.float64).swapaxes(1, 2)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(expected, found.astype(np.float64), rtol=2 * eps, atol=200 * eps)


def test_tf32_is_asked_for_by_the_switch(by_triton):
    by_triton("Triton_64x64")
    a = np.full((64, 64), 1 + 2**-12, np.float32)  # less than TF32's ten bits tell
    exact = blas.mm(cudatool.asarray(a), cudatool.asarray(a)).get()
    assert (exact > 64).all()
    backends.cuda.matmul.allow_tf32 = True
    try:
        assert (64 == blas.mm(cudatool.asarray(a), cudatool.asarray(a)).get()).all()
    finally:
        backends.cuda.matmul.allow_tf32 = False


def test_the_trace_tells_of_a_kernel(by_triton, events):
    by_triton("Triton_32x32")
    blas.mm(cudatool.ones((64, 64)), cudatool.ones((64, 64)))
    assert "gemm" in [event.name for event in events if event.kind == Kind.KERNEL_LAUNCH]
