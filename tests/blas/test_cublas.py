"""What cuBLAS is told on a GPU: on the software device, by a cuBLAS and a cuBLASLt of NumPy that take the same arguments."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from blas_cases import exact, values

import cudatool
from cudatool import blas
from cudatool.backends._settings import settings
from cudatool.blas import _again, _cublas, _cublaslt, _gemm, _host, _workspace
from cudatool.blas._numerics import apply_epilogue
from cudatool.errors import CudaError, UsageError
from cudatool.runtime.plans import LaunchPlans

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
TYPES = {code: np.dtype(dtype) for dtype, code in _cublas.DATA_TYPES.items()}
SUMS = {68: np.float32, 77: np.float32, 70: np.float64, 72: np.int32}
EPILOGUES = {code: name for name, code in _cublaslt._EPILOGUES.items()}


class CublasError(Exception):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


def memory(address, dtype, shape, strides):
    """Return device memory as an array; `strides` are in elements."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    elements = np.frombuffer(raw, np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(elements, shape, [stride * dtype.itemsize for stride in strides])


def columns(address, dtype, rows, count, leading, step=0, batch=1):
    """Return matrices that are stored by columns."""
    if leading < max(1, rows):
        raise CublasError(7)
    return memory(address, dtype, (batch, rows, count), (step, 1, leading))


def operand(address, dtype, operation, rows, count, leading, step, batch):
    if operation == 0:
        return columns(address, dtype, rows, count, leading, step, batch)
    found = columns(address, dtype, count, rows, leading, step, batch).swapaxes(1, 2)
    return found.conj() if operation == 2 else found


def scalar(address, compute, dtype):
    factor = dtype if dtype.kind == "c" else np.dtype(SUMS[compute])
    return memory(address, factor, (1,), (1,))[0]


class Cublas:
    """cublasGemmEx and its like; a handle knows its stream and its workspace."""

    cuBLASError = CublasError  # noqa: N815 - nvmath's name

    def __init__(self):
        self.calls = []
        self.handles = 0

    def create(self):
        self.handles += 1
        return self.handles

    def set_stream(self, handle, stream):
        self.calls.append(("stream", stream))

    def set_workspace(self, handle, address, size):
        self.calls.append(("workspace", address, size))

    def set_math_mode(self, handle, mode):
        self.calls.append(("math", mode))

    def gemm_ex(self, handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algorithm):
        self.gemm_strided_batched_ex(
            handle, ta, tb, m, n, k, alpha, a, at, lda, 0, b, bt, ldb, 0, beta, c, ct, ldc, 0, 1, compute, algorithm
        )

    def gemm_strided_batched_ex(
        self,
        handle,
        ta,
        tb,
        m,
        n,
        k,
        alpha,
        a,
        at,
        lda,
        sa,
        b,
        bt,
        ldb,
        sb,
        beta,
        c,
        ct,
        ldc,
        sc,
        batch,
        compute,
        algorithm,
    ):
        cudatool.synchronize()
        self.calls.append(("gemm", compute, batch))
        assert (handle, algorithm) == (1, -1)
        left = operand(a, TYPES[at], ta, m, k, lda, sa, batch)
        right = operand(b, TYPES[bt], tb, k, n, ldb, sb, batch)
        out = columns(c, TYPES[ct], m, n, ldc, sc, batch)
        wide = np.complex128 if left.dtype.kind == "c" else np.float64
        total = scalar(alpha, compute, left.dtype) * (left.astype(wide) @ right.astype(wide))
        factor = scalar(beta, compute, left.dtype)
        out[...] = total + factor * out.astype(wide) if factor else total


class CublasLt:
    """cublasLtMatmul, with descriptors as dictionaries."""

    cuBLASLtError = CublasError  # noqa: N815 - nvmath's name
    MatmulDescAttribute = SimpleNamespace(
        TRANSA=3, TRANSB=4, EPILOGUE=7, EPILOGUE_AUX_LD=12, FAST_ACCUM=25, BIAS_DATA_TYPE=26
    )
    MatrixLayoutAttribute = SimpleNamespace(BATCH_COUNT=5, STRIDED_BATCH_OFFSET=6)
    MatmulPreferenceAttribute = SimpleNamespace(
        MAX_WORKSPACE_BYTES=1,
        REDUCTION_SCHEME_MASK=3,
        MIN_ALIGNMENT_A_BYTES=5,
        MIN_ALIGNMENT_B_BYTES=6,
        MIN_ALIGNMENT_C_BYTES=7,
        MIN_ALIGNMENT_D_BYTES=8,
    )
    matmul_heuristic_result_dtype = np.dtype(
        [
            ("algo", [("data_", "<u8", (8,))]),
            ("workspace_size", "<u8"),
            ("state", "<i4"),
            ("waves", "<f4"),
            ("r", "<i4", 4),
        ]
    )

    def __init__(self):
        self.things = {}
        self.preferences = []
        self.heuristics = 0
        self.algorithms = []
        self.known = 3
        self.status = 0

    def _make(self, **facts):
        handle = max(self.things, default=0) + 1
        self.things[handle] = facts
        return handle

    def matmul_desc_create(self, compute, scale):
        return self._make(compute=compute, scale=scale)

    def matrix_layout_create(self, kind, rows, count, leading):
        return self._make(shape=(rows, count), dtype=TYPES[kind], leading=leading)

    def matmul_preference_create(self):
        return self._make()

    def matmul_preference_destroy(self, handle):
        self.preferences.append(self.things.pop(handle))

    def matmul_desc_destroy(self, handle):
        del self.things[handle]

    matrix_layout_destroy = matmul_desc_destroy

    def _set(self, handle, attribute, address, size):
        self.things[handle][attribute] = int.from_bytes(ctypes.string_at(address, size), "little")

    matmul_desc_set_attribute = matrix_layout_set_attribute = matmul_preference_set_attribute = _set

    def matmul_algo_get_heuristic(self, handle, description, a, b, c, d, preference, count, results, returned):
        self.heuristics += 1
        if self.status:
            raise CublasError(self.status)
        found = memory(results, self.matmul_heuristic_result_dtype, (count,), (1,))
        number = min(count, self.known)
        for index in range(number):
            found["algo"]["data_"][index] = index + 1
        memory(returned, np.dtype("i4"), (1,), (1,))[0] = number

    def matmul_algo_check(self, handle, description, a, b, c, d, algorithm, result):
        if memory(algorithm, np.dtype("u8"), (8,), (1,))[0] > self.known:
            raise CublasError(15)

    def matmul(self, handle, description, alpha, a, la, b, lb, beta, c, lc, d, ld, algorithm, workspace, size, stream):
        cudatool.synchronize()
        told = self.things[description]
        self.algorithms.append(int(memory(algorithm, np.dtype("u8"), (1,), (1,))[0]))
        left, right = (
            self._operand(address, self.things[layout], told[transposed])
            for address, layout, transposed in ((a, la, 3), (b, lb, 4))
        )
        out, added = self._operand(d, self.things[ld], 0), self.things[lc]
        compute = told["compute"]
        wide = np.complex128 if left.dtype.kind == "c" else np.float64
        total = scalar(alpha, compute, left.dtype) * (left.astype(wide) @ right.astype(wide))
        for attribute in (17, 18):
            if attribute in told:
                if told[attribute] % 16:
                    raise CublasError(15)
                total = total * memory(told[attribute], np.dtype("f4"), (1,), (1,))[0]
        factor = scalar(beta, compute, left.dtype)
        if factor:
            assert (c, added) == (d, self.things[ld])
            total = total + factor * out.astype(wide)
        elif added["dtype"] != out.dtype:
            assert c == 0
        self._finish(told, total, out)

    def _finish(self, told, total, out):
        """Do the epilogue: to cuBLAS the result is transposed, so that its rows are what a bias has one element of."""
        epilogue = EPILOGUES[told[7]]
        rows = total.shape[1]
        bias = aux = None
        if epilogue.reads_bias or epilogue.writes_bias:
            bias = memory(told[8], TYPES[told[26]], (rows,), (1,))
        if epilogue.reads_aux or epilogue.writes_aux:
            bits = "relu" in epilogue
            assert told[12] % (128 if bits else 8) == 0
            assert told[12] >= rows
            if bits:
                aux = memory(told[11], np.dtype("u1"), (total.shape[2], told[12] // 8), (told[12] // 8, 1))
            else:
                aux = memory(told[11], out.dtype, (total.shape[2], rows), (told[12], 1))
        if epilogue:
            assert len(total) == 1
            total = apply_epilogue(total[0].T, epilogue, bias, aux).T[None]
        if 20 in told:
            total = total * memory(told[20], np.dtype("f4"), (1,), (1,))[0]
        out[...] = total

    @staticmethod
    def _operand(address, layout, operation):
        batch, step = layout.get(5, 1), layout.get(6, 0)
        found = columns(address, layout["dtype"], *layout["shape"], layout["leading"], step, batch)
        found = found.swapaxes(1, 2) if operation else found
        return found.conj() if operation == 2 else found


@pytest.fixture
def cublas(device, monkeypatch):
    """The libraries that are called, in the place of those of a GPU."""
    if device != "sim":
        pytest.skip("a GPU has its own cuBLAS, which computes in its own memory")
    fake = SimpleNamespace(plain=Cublas(), lt=CublasLt())
    monkeypatch.setattr(_cublas, "bindings", lambda: fake.plain)
    monkeypatch.setattr(_cublaslt, "_bindings", lambda: fake.lt)
    monkeypatch.setattr(_gemm, "_default", _cublas.gemm)
    monkeypatch.setattr(_gemm, "_like", _cublas.like)
    monkeypatch.setattr(_again, "_plans", LaunchPlans())
    monkeypatch.setattr(_cublas, "_handles", _cublas._Handles())
    monkeypatch.setattr(_cublas, "_spare", {})
    monkeypatch.setattr(_cublaslt, "_plans", _cublaslt._Plans())
    library = settings.blas_library
    yield fake
    settings.blas_library = library
    settings.deterministic = settings.deterministic_warn_only = False
    _cublaslt._plans.found.clear()
    _again._plans.clear()
    gc.collect()  # another thread's plans go with it
    assert {} == fake.lt.things


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def check(expected, found, tolerance=1e-2):
    np.testing.assert_allclose(found.get().astype(expected.dtype), expected, rtol=tolerance, atol=tolerance)


DTYPES = pytest.mark.parametrize("dtype", ["f4", "f8", "f2", BF16, "c8", "c16"], ids=lambda dtype: str(np.dtype(dtype)))
LIBRARIES = pytest.mark.parametrize("library", ["cublas", "cublaslt"])


@LIBRARIES
@DTYPES
@pytest.mark.parametrize("turned", ["", "a", "b", "ab", "out"])
def test_products_and_sums(cublas, rng, library, dtype, turned):
    settings.blas_library = library
    a, b, c = values(rng, (3, 6, 8), dtype), values(rng, (3, 8, 5), dtype), values(rng, (3, 6, 5), dtype)
    x, y, z = (
        cudatool.asarray(np.ascontiguousarray(array.swapaxes(1, 2))).transpose(0, 2, 1)
        if name in turned
        else cudatool.asarray(array)
        for name, array in (("a", a), ("b", b), ("out", c))
    )
    expected = 0.5 * exact(c) + 2 * (exact(a) @ exact(b))
    check(expected, blas.baddbmm(z, x, y, beta=0.5, alpha=2, out=z), 0.05)
    check(exact(a[0]) @ exact(b[0]), blas.mm(x[0], y[0]), 0.05)
    by_cublas = sum(call[0] == "gemm" for call in cublas.plain.calls)
    assert ((2, 0) if library == "cublas" else (0, 2)) == (by_cublas, len(cublas.lt.algorithms))


@LIBRARIES
def test_adjoints(cublas, rng, library):
    settings.blas_library = library
    a, b = values(rng, (8, 6), "c8"), values(rng, (5, 8), "c8")
    found = blas.mm(blas.conj(cudatool.asarray(a)).T, blas.conj(cudatool.asarray(b)).T)
    check(exact(a).conj().T @ exact(b).conj().T, found)


def test_integers(cublas, rng):
    a, b = rng.integers(-128, 128, (16, 8)).astype("i1"), rng.integers(-128, 128, (8, 16)).astype("i1")
    np.testing.assert_array_equal(a.astype("i4") @ b.astype("i4"), blas.int_mm(*map(cudatool.asarray, (a, b))).get())


def test_tf32_is_a_type_of_computation(cublas):
    a = cudatool.ones((4, 4))
    try:
        cudatool.backends.cuda.matmul.allow_tf32 = True
        blas.mm(a, a)
    finally:
        cudatool.backends.cuda.matmul.allow_tf32 = False
    blas.mm(a, a)
    assert [77, 68] == [call[1] for call in cublas.plain.calls if call[0] == "gemm"]


@pytest.mark.parametrize("dtype", ["f4", "f2", BF16], ids=lambda dtype: str(np.dtype(dtype)))
def test_linear_and_activations(cublas, rng, dtype):
    x, w, b = values(rng, (2, 6, 8), dtype), values(rng, (5, 8), dtype), values(rng, (5,), dtype)
    given = [cudatool.asarray(array) for array in (x, w, b)]
    total = exact(x) @ exact(w).T + exact(b)
    check(total, blas.linear(*given), 0.05)
    check(np.maximum(total[0], 0), blas.addmm_activation(given[2], given[0][0], given[1].T), 0.05)
    full = cudatool.asarray(np.broadcast_to(b, (6, 5)))
    check(np.maximum(total[0], 0), blas.addmm_activation(full, given[0][0], given[1].T), 0.05)


@pytest.mark.parametrize("columns", [40, 128])
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_epilogues_of_the_backward_pass(cublas, rng, name, columns):
    x, w, b = values(rng, (6, 8), "f4"), values(rng, (8, columns), "f4"), values(rng, (columns,), "f4")
    x, w, b = (cudatool.asarray(array) for array in (x, w, b))
    forward = blas.mm_epilogue(x, w, f"{name}_aux_bias", bias=b)
    back = blas.mm_epilogue(x, w, f"d{name}_bgrad", aux=forward.aux)
    _gemm._default = _host.gemm
    expected = blas.mm_epilogue(x, w, f"{name}_aux_bias", bias=b)
    expected_back = blas.mm_epilogue(x, w, f"d{name}_bgrad", aux=expected.aux)
    for one, other in ((expected, forward), (expected_back, back)):
        check(one.out.get(), other.out, 1e-4)
    check(expected_back.bias_gradient.get(), back.bias_gradient, 1e-3)
    check(expected.aux.get(), forward.aux, 1e-4)


@pytest.mark.parametrize("out_dtype", ["f4", BF16, E4M3], ids=lambda dtype: str(np.dtype(dtype)))
def test_eight_bits(cublas, rng, out_dtype):
    a, b, bias = values(rng, (16, 32), E4M3), values(rng, (48, 32), E4M3), values(rng, (48,), BF16)
    scales = cudatool.asarray(np.array([0.5, 2, 0.25], "f4"))
    options = {"scale_result": scales[2:]} if out_dtype == E4M3 else {}
    if out_dtype != "f4":
        options["bias"] = cudatool.asarray(bias)
    x, y = cudatool.asarray(a), cudatool.asarray(b).T
    found = blas.scaled_mm(x, y, scales[:1], scales[1:2], out_dtype=out_dtype, use_fast_accum=True, **options)
    total = exact(a) @ exact(b).T + (exact(bias) if "bias" in options else 0)
    np.testing.assert_allclose(
        found.get().astype("f8"), total / 4 if out_dtype == E4M3 else total, rtol=0.07, atol=0.05
    )


# Products like one before.


def test_a_product_like_one_before_is_of_its_own_operands(cublas, rng):
    first, second = values(rng, (2, 4, 6), "f4"), values(rng, (2, 6, 5), "f4")
    seen = []
    for a, b in zip(first, second, strict=True):
        x, y, out = cudatool.asarray(a), cudatool.asarray(b), cudatool.empty((5, 4)).T
        for found in (blas.mm(x, y), blas.mm(x, y), blas.mm(x, y, out=out), cudatool.matmul(x, y)):
            check(a @ b, found, 1e-4)
        seen.append(len(_again._plans))
    assert [3, 3] == seen  # with out as it lies, and by default, of which each makes one


def test_a_product_like_one_before_is_not_worked_out(cublas, rng, monkeypatch):
    def refuse(*_):
        raise AssertionError("a product was worked out anew")

    a, b = values(rng, (2, 6, 4), "f4"), values(rng, (2, 4, 5), "f4")
    for index in range(2):
        x, y, out = cudatool.asarray(a[index]), cudatool.asarray(b[index]), cudatool.empty((6, 5))
        for found in (blas.mm(x, y, out=out), blas.mm(x, y)):
            check(a[index] @ b[index], found, 1e-4)
        monkeypatch.setattr(_gemm, "_default", refuse)
    with pytest.raises(UsageError, match="out must have"):
        blas.mm(x, y, out=np.empty((6, 5), "f4"))


@pytest.mark.parametrize("change", ["transposed", "dtype", "switch", "library", "shape"])
def test_what_has_changed_is_decided_anew(cublas, rng, change):
    a, b = values(rng, (6, 6), "f4"), values(rng, (6, 6), "f4")
    x, y = cudatool.asarray(a), cudatool.asarray(b)
    blas.mm(x, y)
    before = len(cublas.plain.calls)
    if change == "transposed":
        check(a @ b.T, blas.mm(x, y.T), 1e-4)
    elif change == "dtype":
        check(
            a.astype("f8") @ b.astype("f8"), blas.mm(*(cudatool.asarray(array.astype("f8")) for array in (a, b))), 1e-4
        )
    elif change == "shape":
        check(a[:4] @ b, blas.mm(x[:4], y), 1e-4)
    elif change == "library":
        settings.blas_library = "cublaslt"
        blas.mm(x, y)
        assert (before, [1]) == (len(cublas.plain.calls), cublas.lt.algorithms)
    else:
        try:
            cudatool.backends.cuda.matmul.allow_tf32 = True
            blas.mm(x, y)
        finally:
            cudatool.backends.cuda.matmul.allow_tf32 = False
        assert ("gemm", 77, 1) == cublas.plain.calls[-1]


def test_what_is_refused_is_refused_again(cublas):
    a, b, whole = cudatool.ones((4, 4)), cudatool.ones((4, 4)), cudatool.ones((8, 4))
    blas.mm(a, b, out=whole[:4])
    for _ in range(2):
        with pytest.raises(UsageError, match="overlaps"):
            blas.mm(whole[4:], b, out=whole[4:])
        with pytest.raises(UsageError, match="out must have shape"):
            blas.mm(a, b, out=whole)
    blas.int_mm(cudatool.asarray(np.ones((8, 8), "i1")), cudatool.asarray(np.ones((8, 8), "i1")))
    with pytest.raises(UsageError, match="not int8"):
        blas.mm(*(cudatool.asarray(np.ones((8, 8), "i1")) for _ in range(2)))


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_linear_like_one_before_is_of_its_own_operands(cublas, rng, shape):
    x, w, b = values(rng, (3, *shape), "f4"), values(rng, (3, 5, 8), "f4"), values(rng, (3, 64), "f4")[:, :5].copy()
    for index in range(3):
        arrays = [cudatool.asarray(array[index]) for array in (x, w, b)]
        check(x[index] @ w[index].T + b[index], blas.linear(*arrays), 1e-4)
    assert 1 == cublas.lt.heuristics
    odd = cudatool.asarray(np.concatenate([b[0], b[0]]))[5:]  # at another alignment
    check(x[2] @ w[2].T + b[0], blas.linear(*arrays[:2], odd), 1e-4)
    assert 2 == cublas.lt.heuristics
    check(x[2] @ w[2].T + b[2], blas.linear(*arrays), 1e-4)
    with pytest.raises(UsageError, match="bias must have shape"):
        blas.linear(*arrays[:2], arrays[2][:4])
    turned = cudatool.asarray(np.ascontiguousarray(np.swapaxes(x[0], 0, -1))).transpose(*range(x[0].ndim)[::-1])
    if len(shape) == 2:
        check(x[0] @ w[2].T + b[2], blas.linear(turned, *arrays[1:]), 1e-4)


def test_each_thread_has_plans_of_its_own(cublas, rng):
    x, w, b = (cudatool.asarray(values(rng, shape, "f4")) for shape in ((6, 8), (5, 8), (5,)))
    blas.linear(x, w, b)
    thread = threading.Thread(target=lambda: blas.linear(x, w, b))
    thread.start()
    thread.join()
    blas.linear(x, w, b)
    assert 2 == cublas.lt.heuristics


def test_a_product_like_one_before_is_told_while_somebody_listens(cublas, events):
    a, b = cudatool.ones((4, 4)), cudatool.ones((4, 4))
    blas.mm(a, b)
    events.clear()
    blas.mm(a, b)
    assert "sgemm" in [event.name for event in events]


# Plans.


def test_a_plan_is_made_once_and_told_the_addresses_of_each_call(cublas, rng):
    x, w = values(rng, (8, 8), "f4"), values(rng, (8, 8), "f4")
    biases = values(rng, (3, 64), "f4")[:, ::8].copy()
    for bias in biases:
        check(x @ w.T + bias, blas.linear(*(cudatool.asarray(array) for array in (x, w, bias))), 1e-4)
    assert (1, [1, 1, 1]) == (cublas.lt.heuristics, cublas.lt.algorithms)


def test_a_plan_is_of_one_alignment(cublas):
    settings.blas_library = "cublaslt"
    memory = cudatool.ones((8 * 8 + 1,))
    for start in (0, 1, 0):
        blas.mm(memory[start : start + 64].reshape(8, 8), cudatool.ones((8, 8)))
    assert [256, 4] == [told[5] for told in cublas.lt.preferences]


def test_full_reductions_are_asked_for(cublas):
    matmul = cudatool.backends.cuda.matmul
    a = cudatool.asarray(np.ones((8, 8), "f2"))
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        blas.mm(a, a)
        settings.blas_library = "cublaslt"
        blas.mm(a, a)
    finally:
        matmul.allow_fp16_reduced_precision_reduction = True
    blas.mm(a, a)
    settings.blas_library = "cublas"
    blas.mm(a, a)
    assert [16, 0] == [call[1] for call in cublas.plain.calls if call[0] == "math"]
    assert [2, None] == [told.get(3) for told in cublas.lt.preferences]


def test_an_algorithm_is_used_if_it_fits_and_else_the_best(cublas):
    seen = []
    _gemm.tuner = lambda gemm, stream: seen.append(gemm)
    a = cudatool.ones((8, 8))
    out = blas.mm(a, a)
    _gemm.tuner = None
    stream = cudatool.current_stream()
    found = _cublaslt.algorithms(seen[0], stream, 8)
    assert [3, 64] == [len(found), len(found[0])]
    for algorithm in (found[2], found[1], (99).to_bytes(8, "little").ljust(64, b"\0")):
        _cublaslt.gemm(seen[0], stream, algorithm)
    assert [3, 2, 1] == cublas.lt.algorithms
    assert {8.0} == set(out.get().ravel().tolist())


@pytest.mark.parametrize(("status", "known"), [(15, 3), (0, 0)])
def test_a_product_that_cublaslt_does_not_have_is_refused(cublas, status, known):
    settings.blas_library = "cublaslt"
    cublas.lt.status, cublas.lt.known = status, known
    with pytest.raises(UsageError, match="no algorithm for"):
        blas.mm(cudatool.ones((8, 8)), cudatool.ones((8, 8)))


def test_errors_of_the_libraries_are_ours(cublas, monkeypatch):
    def fail(*_):
        raise CublasError(13)

    monkeypatch.setattr(cublas.plain, "gemm_ex", fail)
    monkeypatch.setattr(cublas.lt, "matmul", fail)
    for library in ("cublas", "cublaslt"):
        settings.blas_library = library
        with pytest.raises(CudaError, match=r"cuBLAS.*status 13"):
            blas.mm(cudatool.ones((8, 8)), cudatool.ones((8, 8)))


# Handles and workspaces.


@pytest.mark.parametrize(
    ("config", "capability", "expected"),
    [
        (None, 8, (2 * 4096 + 8 * 16) * 1024),
        (None, 9, 32 * 1024 * 1024),
        (None, 10, 32 * 1024 * 1024),
        (":4096:8", 9, 32 * 1024 * 1024),
        (":16:8", 9, 128 * 1024),
        (":4096:2:16:8", 9, (2 * 4096 + 8 * 16) * 1024),
        (":0:0", 9, 0),
    ],
)
def test_the_size_of_workspaces(config, capability, expected):
    assert expected == _workspace.workspace_size(config, capability)


def test_a_size_that_cannot_be_read_is_the_default():
    with pytest.warns(UserWarning, match="4096 is not :SIZE:COUNT"):
        assert 32 * 1024 * 1024 == _workspace.workspace_size("4096", 9)


def workspaces(calls):
    return [call for call in calls if call[0] in ("stream", "workspace")]


def test_a_handle_is_told_its_stream_when_that_changes(cublas):
    a, out = cudatool.ones((8, 8)), cudatool.empty((8, 8))
    other = cudatool.Stream()
    for stream in (cudatool.default_stream(), cudatool.default_stream(), other, cudatool.default_stream()):
        with cudatool.stream(stream):
            blas.mm(a, a, out=out)
    told = workspaces(cublas.plain.calls)
    legacy = cudatool.default_stream().native
    assert [("stream", legacy), ("stream", other.native), ("stream", legacy)] == told[::2]
    first, second, third = (call[1] for call in told[1::2])
    assert first == third != second
    assert 1 == cublas.plain.handles


def test_threads_that_follow_each_other_share_a_handle(cublas):
    a = cudatool.ones((8, 8))
    blas.mm(a, a)
    cublas.plain.gemm_ex = lambda handle, *_: used.append(handle)
    used = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: blas.mm(a, a))
        thread.start()
        thread.join()
    blas.mm(a, a)
    assert [2, 2, 2, 1] == used
    assert 2 == cublas.plain.handles


def test_workspaces_are_given_back_when_they_are_cleared(cublas):
    a, out = cudatool.ones((8, 8)), cudatool.empty((8, 8))
    before = cudatool.memory_allocated()
    blas.mm(a, a, out=out)
    assert before + _workspace.workspace_size(None, 9) == cudatool.memory_allocated()
    blas.clear_workspaces()
    assert before == cudatool.memory_allocated()
    blas.mm(a, a, out=out)
    assert 2 == len(workspaces(cublas.plain.calls)) // 2


def test_a_graph_has_workspaces_of_its_own(cublas, monkeypatch):
    a, out, stream = cudatool.ones((8, 8)), cudatool.empty((8, 8)), cudatool.Stream()
    with cudatool.stream(stream):
        blas.mm(a, a, out=out)
        monkeypatch.setattr(cublas.plain, "gemm_ex", lambda *_: None)  # it could not wait for the stream
        graph = cudatool.CUDAGraph()
        with cudatool.graph(graph, stream=stream):
            out.fill_(0)  # a graph of nothing gets a warning
            blas.mm(a, a, out=out)
            blas.mm(a, a, out=out)
        blas.mm(a, a, out=out)
    eager, first, second, again = (call[1] for call in workspaces(cublas.plain.calls)[1::2])
    assert eager == again
    assert first == second != eager  # free for the next node when the one before is there


def test_products_must_be_deterministic_if_they_are_asked_to_be(cublas, monkeypatch):
    a = cudatool.ones((8, 8))
    cudatool.use_deterministic_algorithms(True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG to :4096:8 or :16:8"):
        blas.mm(a, a)
    cudatool.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="may differ"):
        blas.mm(a, a)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cudatool.use_deterministic_algorithms(True)
    blas.mm(a, a)
    assert cudatool.are_deterministic_algorithms_enabled()
    assert not cudatool.is_deterministic_algorithms_warn_only_enabled()


def test_without_nvmath_the_error_says_what_to_install(device):
    program = (
        "import sys; sys.modules['nvmath'] = None\n"
        "from cudatool.blas import _cublas\n"
        "try:\n    _cublas.bindings()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("DeviceUnavailableError products on a GPU need cuBLAS: pip install 'cudatool[gpu]'")
