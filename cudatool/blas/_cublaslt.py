"""Products by cuBLASLt: epilogues, scales of 8-bit elements, a choice of algorithms.

Asking which algorithm is best takes longer than a small product. So a plan is kept for each shape, layout, dtype,
epilogue and alignment, by thread, because the addresses of bias and auxiliary matrix are parts of it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool._allocator import Layout
from cudatool._stream import Stream
from cudatool.blas._cublas import COMPUTE_TYPES, DATA_TYPES, Handle, address_of, handle_for, scalar, scalar_type
from cudatool.blas._gemm import FP8, Epilogue, Gemm
from cudatool.blas._layout import Matrix
from cudatool.blas._workspace import size_of_workspace
from cudatool.errors import CudaError, UsageError

__all__ = ["Plan", "algorithms", "gemm"]

_EPILOGUES: Final = {
    # -> cublasLtEpilogue_t
    Epilogue.NONE: 1,
    Epilogue.RELU: 2,
    Epilogue.GELU: 32,
    Epilogue.BIAS: 4,
    Epilogue.RELU_BIAS: 2 | 4,
    Epilogue.GELU_BIAS: 32 | 4,
    Epilogue.RELU_AUX: 2 | 128,
    Epilogue.GELU_AUX: 32 | 128,
    Epilogue.RELU_AUX_BIAS: 2 | 128 | 4,
    Epilogue.GELU_AUX_BIAS: 32 | 128 | 4,
    Epilogue.DRELU: 8 | 128,
    Epilogue.DGELU: 64 | 128,
    Epilogue.DRELU_BGRAD: 8 | 128 | 16,
    Epilogue.DGELU_BGRAD: 64 | 128 | 16,
}
_FULL_REDUCTION: Final = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; NONE is 0
_ALGORITHM_BYTES: Final = 64  # of cublasLtMatmulAlgo_t
_MOST_ALIGNMENT: Final = 256


class _Key(NamedTuple):
    """What a plan depends on."""

    device: int
    sizes: tuple[int, int, int, int]
    left: tuple[int, Matrix]  # cudaDataType and layout
    right: tuple[int, Matrix]
    out: tuple[int, Matrix]
    compute: int
    scalar: int
    epilogue: Epilogue
    bias: int  # cudaDataType, -1 for none
    aux_leading: int
    alignments: tuple[int, ...]
    has_scales: tuple[bool, bool]  # of the operands, of the result
    fast_accumulation: bool
    full_reduction: bool


class Plan:
    """Descriptors of a product, which are the driver's memory, and the algorithms that fit it."""

    def __init__(self, key: _Key) -> None:
        lt = _bindings()
        attribute, layout = lt.MatmulDescAttribute, lt.MatrixLayoutAttribute
        m, n, k, batch = key.sizes
        self.description: int = lt.matmul_desc_create(key.compute, key.scalar)
        self.layouts: list[int] = []
        self._pointer = np.zeros(1, np.uint64)
        for (kind, matrix), rows, columns in ((key.left, m, k), (key.right, k, n), (key.out, m, n)):
            if matrix.operation:
                rows, columns = columns, rows
            handle = lt.matrix_layout_create(kind, rows, columns, matrix.leading)
            self.layouts.append(handle)
            if batch > 1:
                _set(lt.matrix_layout_set_attribute, handle, layout.BATCH_COUNT, np.int32(batch))
                _set(lt.matrix_layout_set_attribute, handle, layout.STRIDED_BATCH_OFFSET, np.int64(matrix.step))
        self._put(attribute.TRANSA, np.int32(key.left[1].operation))
        self._put(attribute.TRANSB, np.int32(key.right[1].operation))
        self._put(attribute.EPILOGUE, np.uint32(_EPILOGUES[key.epilogue]))
        if key.bias >= 0:
            self._put(attribute.BIAS_DATA_TYPE, np.int32(key.bias))
        if key.aux_leading:
            self._put(attribute.EPILOGUE_AUX_LD, np.int64(key.aux_leading))
        if key.fast_accumulation:
            self._put(attribute.FAST_ACCUM, np.int8(1))

    def _put(self, attribute: int, value: np.generic) -> None:
        _set(_bindings().matmul_desc_set_attribute, self.description, attribute, value)

    def point(self, attribute: int, layout: Layout) -> None:
        """Set an address that is a part of the description."""
        self._pointer[0] = address_of(layout)
        _bindings().matmul_desc_set_attribute(self.description, attribute, self._pointer.ctypes.data, 8)

    def find(self, handle: int, count: int, workspace: int, key: _Key) -> Any:
        """Return up to `count` algorithms that need no more than `workspace` bytes, the most promising first."""
        lt = _bindings()
        wanted = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        try:
            put = functools.partial(_set, lt.matmul_preference_set_attribute, preference)
            put(wanted.MAX_WORKSPACE_BYTES, np.uint64(workspace))
            for name, alignment in zip("ABCD", (*key.alignments[:3], key.alignments[2]), strict=True):
                put(getattr(wanted, f"MIN_ALIGNMENT_{name}_BYTES"), np.uint32(alignment))
            if key.full_reduction:
                put(wanted.REDUCTION_SCHEME_MASK, np.uint32(_FULL_REDUCTION))
            found = np.zeros(count, lt.matmul_heuristic_result_dtype)
            returned = np.zeros(1, np.int32)
            left, right, out = self.layouts
            lt.matmul_algo_get_heuristic(
                handle,
                self.description,
                left,
                right,
                out,
                out,
                preference,
                count,
                found.ctypes.data,
                returned.ctypes.data,
            )
        finally:
            lt.matmul_preference_destroy(preference)
        usable = found[: int(returned[0])]
        return usable[usable["state"] == 0]

    def check(self, handle: int, algorithm: bytes, workspace: int) -> Any:
        """Return an algorithm as :meth:`find` does, None if it cannot do this, or not with so much `workspace`."""
        lt = _bindings()
        found = np.zeros(1, lt.matmul_heuristic_result_dtype)
        given = np.frombuffer(algorithm.ljust(_ALGORITHM_BYTES, b"\0"), np.uint8).copy()
        left, right, out = self.layouts
        try:
            lt.matmul_algo_check(handle, self.description, left, right, out, out, given.ctypes.data, found.ctypes.data)
        except lt.cuBLASLtError:
            return None
        if found["state"][0] or found["workspace_size"][0] > workspace:
            return None
        found.view(np.uint8)[:_ALGORITHM_BYTES] = given
        return found

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if not _finalizing():
            lt = _bindings()
            for layout in getattr(self, "layouts", ()):
                lt.matrix_layout_destroy(layout)
            if hasattr(self, "description"):
                lt.matmul_desc_destroy(self.description)


class _Plans(threading.local):
    def __init__(self) -> None:
        self.found: dict[tuple[_Key, bytes], tuple[Plan, Any]] = {}  # by algorithm too


_plans = _Plans()
_MOST_PLANS: Final = 4096


@functools.cache
def _bindings() -> Any:
    from nvmath.bindings import cublasLt

    return cublasLt


def _set(setter: Any, target: int, attribute: int, value: np.generic) -> None:
    held = np.array([value])
    setter(target, int(attribute), held.ctypes.data, held.nbytes)


def _key(gemm: Gemm, device: int) -> tuple[_Key, Layout, Layout]:
    """Return what the plan of a product depends on, and cuBLAS's left and right operands."""
    product = gemm.product
    left, right = (gemm.b, gemm.a) if product.swapped else (gemm.a, gemm.b)
    first, second = (product.b, product.a) if product.swapped else (product.a, product.b)
    held = [left, right, gemm.out, *(layout for layout in (gemm.bias, gemm.aux) if layout is not None)]
    leading = 0
    if gemm.aux is not None:
        leading = gemm.aux.strides[0] * 8 if "relu" in gemm.epilogue else gemm.aux.strides[0] // gemm.aux.itemsize
    key = _Key(
        device,
        (product.m, product.n, product.k, product.batch),
        (DATA_TYPES[left.dtype], first),
        (DATA_TYPES[right.dtype], second),
        (DATA_TYPES[gemm.out.dtype], product.out),
        COMPUTE_TYPES[gemm.compute],
        DATA_TYPES[scalar_type(gemm)],
        gemm.epilogue,
        -1 if gemm.bias is None else DATA_TYPES[gemm.bias.dtype],
        leading,
        tuple(_alignment(address_of(layout)) for layout in held),
        (gemm.scales is not None, gemm.scales is not None and gemm.scales.out is not None),
        gemm.fast_accumulation,
        gemm.full_reduction,
    )
    return key, left, right


def _alignment(address: int) -> int:
    return min(address & -address, _MOST_ALIGNMENT) or _MOST_ALIGNMENT


def _prepare(gemm: Gemm, plan: Plan) -> None:
    """Set the addresses that a plan has beside the operands'."""
    attribute = _bindings().MatmulDescAttribute
    if gemm.bias is not None:
        plan.point(attribute.BIAS_POINTER, gemm.bias)
    if gemm.aux is not None:
        plan.point(attribute.EPILOGUE_AUX_POINTER, gemm.aux)
    if gemm.scales is not None:
        a, b, out = gemm.scales
        first, second = (b, a) if gemm.product.swapped else (a, b)
        plan.point(attribute.A_SCALE_POINTER, first)
        plan.point(attribute.B_SCALE_POINTER, second)
        if out is not None:
            plan.point(attribute.D_SCALE_POINTER, out)


def algorithms(gemm: Gemm, stream: Stream, count: int) -> list[bytes]:
    """Return up to `count` of cuBLASLt's algorithms for a product, the most promising first.

    An algorithm is 64 bytes, which mean the same as long as the version of the library is the same.
    """
    key, _, _ = _key(gemm, stream.device_index)
    plan = Plan(key)
    _prepare(gemm, plan)
    found = plan.find(handle_for(stream).value, count, size_of_workspace(stream), key)
    return [result.tobytes()[:_ALGORITHM_BYTES] for result in found]


def gemm(gemm: Gemm, stream: Stream, algorithm: bytes = b"") -> None:
    """Enqueue a product by an algorithm; if there is none, or it does not fit, by the one that cuBLASLt thinks best.

    Raises
    ------
    UsageError
        cuBLASLt has none for it.
    """
    key, left, right = _key(gemm, stream.device_index)
    handle = handle_for(stream)
    found = _plans.found.get((key, algorithm))
    try:
        if found is None:
            plan = Plan(key)
            _prepare(gemm, plan)
            workspace = size_of_workspace(stream)
            chosen = plan.check(handle.value, algorithm, workspace) if algorithm else None
            if chosen is None:
                chosen = plan.find(handle.value, 1, workspace, key)
            if not len(chosen):
                raise UsageError(_refusal(gemm))
            if len(_plans.found) >= _MOST_PLANS:
                _plans.found.clear()
            found = _plans.found[key, algorithm] = plan, chosen
        else:
            _prepare(gemm, found[0])
        _run(gemm, stream, handle, left, right, *found)
    except _bindings().cuBLASLtError as error:
        raise CudaError(f"cuBLASLt: {error}", "CUDA_ERROR_UNKNOWN") from error


def _refusal(gemm: Gemm) -> str:
    rule = ": rows of 8-bit elements must be multiples of 16 long, and begin at such addresses"
    return (
        f"cuBLASLt has no algorithm for {gemm.a.shape} @ {gemm.b.shape} of {gemm.a.dtype} to {gemm.out.dtype}"
        + (f" with epilogue {gemm.epilogue}" if gemm.epilogue else "")
        + (rule if gemm.a.dtype in FP8 else "")
    )


def _run(
    gemm: Gemm, stream: Stream, handle: Handle, left: Layout, right: Layout, plan: Plan, algorithm: Sequence[Any]
) -> None:
    factor = scalar_type(gemm)
    (alpha, _alpha), (beta, _beta) = scalar(gemm.alpha, factor), scalar(gemm.beta, factor)
    workspace, _held = handle.use(stream)
    out = address_of(gemm.out)
    first, second, result = plan.layouts
    _bindings().matmul(
        handle.value,
        plan.description,
        alpha,
        address_of(left),
        first,
        address_of(right),
        second,
        beta,
        out,
        result,
        out,
        result,
        algorithm.ctypes.data,  # type: ignore[attr-defined]
        workspace,
        size_of_workspace(stream),
        int(stream.core.handle),
    )
