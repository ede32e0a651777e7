"""Products by cuBLASLt: epilogues, scales of 8-bit elements, a choice of algorithms.

Asking which algorithm is best takes longer than a small product. So a plan is kept for each shape, layout, dtype,
epilogue and alignment, by thread, because the addresses of bias and auxiliary matrix are parts of it.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.blas._cublas import COMPUTE_TYPES, DATA_TYPES, handle_for, scalar, scalar_type
from cudatool.blas._gemm import BFLOAT16, FP8, Again, Compute, Epilogue, Gemm
from cudatool.blas._layout import Product
from cudatool.blas._workspace import size_of_workspace
from cudatool.errors import CudaError, UsageError
from cudatool.runtime.plans import LaunchPlans
from cudatool.runtime.stream import Stream

__all__ = ["ProductPlan", "algorithms", "gemm", "like"]

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
_NOT_SUPPORTED: Final = 15  # CUBLAS_STATUS_NOT_SUPPORTED
# cublasLtMatmulDescAttributes_t
_BIAS_POINTER: Final = 8
_AUX_POINTER: Final = 11
_LEFT_SCALE_POINTER: Final = 17
_RIGHT_SCALE_POINTER: Final = 18
_OUT_SCALE_POINTER: Final = 20
_FULL_REDUCTION: Final = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; NONE is 0
_ALGORITHM_BYTES: Final = 64  # of cublasLtMatmulAlgo_t
_MOST_ALIGNMENT: Final = 256


class _Key(NamedTuple):
    """What a plan depends on."""

    device: int
    product: Product
    left: np.dtype[Any]
    right: np.dtype[Any]
    out: np.dtype[Any]
    compute: Compute
    epilogue: Epilogue
    bias: np.dtype[Any] | None
    aux_leading: int
    alignment: int  # of every address, in bytes
    has_scales: bool
    has_out_scale: bool
    fast_accumulation: bool
    full_reduction: bool
    algorithm: bytes  # the one that is wanted, empty for the best


class ProductPlan:
    """Descriptors of a product, which are the library's memory, and the algorithm that computes it.

    Attributes
    ----------
    layouts
        Of left operand, right operand, what is added, and result.
    adds_in_place
        Whether what is added has the result's layout; if not, nothing is added.
    algorithm
        Address of the algorithm, once it is chosen.
    swapped
        Whether the left operand is our `b`.
    factor
        The dtype of alpha and beta.
    """

    def __init__(self, key: _Key) -> None:
        lt = _bindings()
        attribute, layout = lt.MatmulDescAttribute, lt.MatrixLayoutAttribute
        m, n, k, batch, a, b, out, swapped, _ = key.product
        left, right = (b, a) if swapped else (a, b)
        self.swapped = swapped
        self.factor = scalar_type(key.left, key.compute)
        self.description: int = lt.matmul_desc_create(COMPUTE_TYPES[key.compute], DATA_TYPES[self.factor])
        self.layouts: list[int] = []
        self.algorithm = 0
        self._chosen: Any = None  # keeps it
        self._pointer = np.zeros(1, np.uint64)
        self._pointer_at = self._pointer.ctypes.data
        self._pointed: dict[int, int] = {}
        self.adds_in_place = key.out not in FP8
        added = BFLOAT16 if key.out in FP8 else key.out  # never a matrix of 8 bits, even if the result is one
        for dtype, matrix, rows, columns in (
            (key.left, left, m, k),
            (key.right, right, k, n),
            (added, out, m, n),
            (key.out, out, m, n),
        ):
            shape = (columns, rows) if matrix.operation else (rows, columns)
            handle = lt.matrix_layout_create(DATA_TYPES[dtype], *shape, matrix.leading)
            self.layouts.append(handle)
            if batch > 1:
                _set(lt.matrix_layout_set_attribute, handle, layout.BATCH_COUNT, np.int32(batch))
                _set(lt.matrix_layout_set_attribute, handle, layout.STRIDED_BATCH_OFFSET, np.int64(matrix.step))
        self._put(attribute.TRANSA, np.int32(left.operation))
        self._put(attribute.TRANSB, np.int32(right.operation))
        self._put(attribute.EPILOGUE, np.uint32(_EPILOGUES[key.epilogue]))
        if key.bias is not None:
            self._put(attribute.BIAS_DATA_TYPE, np.int32(DATA_TYPES[key.bias]))
        if key.aux_leading:
            self._put(attribute.EPILOGUE_AUX_LD, np.int64(key.aux_leading))
        if key.fast_accumulation:
            self._put(attribute.FAST_ACCUM, np.int8(1))

    def _put(self, attribute: int, value: np.generic) -> None:
        _set(_bindings().matmul_desc_set_attribute, self.description, attribute, value)

    def prepare(self, gemm: Gemm) -> None:
        """Set the addresses that are a part of the description."""
        if gemm.bias is not None:
            self.point(_BIAS_POINTER, gemm.bias.data_ptr())
        if gemm.aux is not None:
            self.point(_AUX_POINTER, gemm.aux.data_ptr())
        if gemm.scales is not None:
            a, b, out = gemm.scales
            first, second = (b, a) if gemm.product.swapped else (a, b)
            self.point(_LEFT_SCALE_POINTER, first.data_ptr())
            self.point(_RIGHT_SCALE_POINTER, second.data_ptr())
            if out is not None:
                self.point(_OUT_SCALE_POINTER, out.data_ptr())

    def point(self, attribute: int, address: int) -> None:
        """Set one of them."""
        if self._pointed.get(attribute) != address:
            self._pointer[0] = address
            _bindings().matmul_desc_set_attribute(self.description, attribute, self._pointer_at, 8)
            self._pointed[attribute] = address

    def choose(self, found: Any) -> None:
        """Use the first of these algorithms."""
        self._chosen = found
        self.algorithm = found.ctypes.data

    def find(self, handle: int, count: int, workspace: int, key: _Key) -> Any:
        """Return up to `count` algorithms that need no more than `workspace` bytes, the most promising first."""
        lt = _bindings()
        wanted = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        try:
            put = functools.partial(_set, lt.matmul_preference_set_attribute, preference)
            put(wanted.MAX_WORKSPACE_BYTES, np.uint64(workspace))
            for name in "ABCD":
                put(getattr(wanted, f"MIN_ALIGNMENT_{name}_BYTES"), np.uint32(key.alignment))
            if key.full_reduction:
                put(wanted.REDUCTION_SCHEME_MASK, np.uint32(_FULL_REDUCTION))
            found = np.zeros(count, lt.matmul_heuristic_result_dtype)
            returned = np.zeros(1, np.int32)
            lt.matmul_algo_get_heuristic(
                handle,
                self.description,
                *self.layouts,
                preference,
                count,
                found.ctypes.data,
                returned.ctypes.data,
            )
        except lt.cuBLASLtError as error:
            if error.status != _NOT_SUPPORTED:
                raise
        finally:
            lt.matmul_preference_destroy(preference)
        usable = found[: int(returned[0])]
        return usable[usable["state"] == 0]

    def check(self, handle: int, algorithm: bytes, workspace: int) -> Any:
        """Return an algorithm as :meth:`find` does, None if it cannot do this, or not with so much `workspace`."""
        lt = _bindings()
        found = np.zeros(1, lt.matmul_heuristic_result_dtype)
        given = np.frombuffer(algorithm.ljust(_ALGORITHM_BYTES, b"\0"), np.uint8).copy()
        try:
            lt.matmul_algo_check(handle, self.description, *self.layouts, given.ctypes.data, found.ctypes.data)
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
        self.found = LaunchPlans[_Key, ProductPlan]()


_plans = _Plans()


@functools.cache
def _bindings() -> Any:
    from nvmath.bindings import cublasLt

    return cublasLt


def _set(setter: Any, target: int, attribute: int, value: np.generic) -> None:
    held = np.array([value])
    setter(target, int(attribute), held.ctypes.data, held.nbytes)


def _key(gemm: Gemm, device: int, algorithm: bytes = b"") -> _Key:
    a, b, out, product, compute, _, _, _, epilogue, bias, aux, scales, fast, full = gemm
    left, right = (b, a) if product.swapped else (a, b)
    bits = a.data_ptr() | b.data_ptr() | out.data_ptr() | _MOST_ALIGNMENT
    leading = 0
    if bias is not None:
        bits |= bias.data_ptr()
    if aux is not None:
        bits |= aux.data_ptr()
        leading = aux.strides[0] * 8 if "relu" in epilogue else aux.strides[0] // aux.dtype.itemsize
    return _Key(
        device,
        product,
        left.dtype,
        right.dtype,
        out.dtype,
        compute,
        epilogue,
        None if bias is None else bias.dtype,
        leading,
        bits & -bits,
        scales is not None,
        scales is not None and scales.out is not None,
        fast,
        full,
        algorithm,
    )


def algorithms(gemm: Gemm, stream: Stream, count: int) -> list[bytes]:
    """Return up to `count` of cuBLASLt's algorithms for a product, the most promising first.

    An algorithm is 64 bytes, which mean the same as long as the version of the library is the same.
    """
    key = _key(gemm, stream.device_index)
    plan = ProductPlan(key)
    plan.prepare(gemm)
    found = plan.find(handle_for(stream).value, count, size_of_workspace(stream), key)
    return [result.tobytes()[:_ALGORITHM_BYTES] for result in found]


def gemm(gemm: Gemm, stream: Stream, algorithm: bytes = b"") -> None:
    """Enqueue a product by an algorithm; if there is none, or it does not fit, by the one that cuBLASLt thinks best.

    Raises
    ------
    UsageError
        cuBLASLt has none for it.
    """
    handle = handle_for(stream)
    key = _key(gemm, stream.device_index, algorithm)
    lt = _bindings()
    try:
        plan = _plans.found.get(key)
        if plan is None:
            plan = _new_plan(gemm, key, handle.value, size_of_workspace(stream))
        else:
            plan.prepare(gemm)
        _launch(plan, gemm.alpha, gemm.beta, gemm.a.data_ptr(), gemm.b.data_ptr(), gemm.out.data_ptr(), stream)
    except lt.cuBLASLtError as error:
        raise CudaError(f"cuBLASLt: {error}", "CUDA_ERROR_UNKNOWN") from error


def like(gemm: Gemm) -> Again | None:
    """Return what enqueues products with a bias like one that this thread has enqueued.

    It is for this thread, and for addresses that are multiples of what this one's are.
    """
    plan = _plans.found.get(_key(gemm, gemm.a.device))
    lt, alpha, beta = _bindings(), gemm.alpha, gemm.beta
    if plan is None or gemm.bias is None or gemm.aux is not None or gemm.scales is not None:
        return None

    def enqueue(a: int, b: int, out: int, bias: int, stream: Stream) -> None:
        try:
            plan.point(_BIAS_POINTER, bias)
            _launch(plan, alpha, beta, a, b, out, stream)
        except lt.cuBLASLtError as error:
            raise CudaError(f"cuBLASLt: {error}", "CUDA_ERROR_UNKNOWN") from error

    return enqueue


def _launch(plan: ProductPlan, alpha: complex, beta: complex, a: int, b: int, out: int, stream: Stream) -> None:
    handle = handle_for(stream)
    (alpha_at, _alpha), (beta_at, _beta) = scalar(alpha, plan.factor), scalar(beta, plan.factor)
    left, right = (b, a) if plan.swapped else (a, b)
    left_layout, right_layout, added_layout, layout = plan.layouts
    workspace, _held = handle.use(stream)
    _bindings().matmul(
        handle.value,
        plan.description,
        alpha_at,
        left,
        left_layout,
        right,
        right_layout,
        beta_at,
        out if plan.adds_in_place else 0,
        added_layout,
        out,
        layout,
        plan.algorithm,
        workspace,
        size_of_workspace(stream),
        stream.native,
    )


def _new_plan(gemm: Gemm, key: _Key, handle: int, workspace: int) -> ProductPlan:
    plan = ProductPlan(key)
    plan.prepare(gemm)
    found = plan.check(handle, key.algorithm, workspace) if key.algorithm else None
    if found is None:
        found = plan.find(handle, 1, workspace, key)
    if not len(found):
        raise UsageError(_refusal(gemm))
    plan.choose(found)
    _plans.found.remember(key, plan)
    return plan


def _refusal(gemm: Gemm) -> str:
    rule = ": rows of 8-bit elements must be multiples of 16 long, and begin at such addresses"
    return (
        f"cuBLASLt has no algorithm for {gemm.a.shape} @ {gemm.b.shape} of {gemm.a.dtype} to {gemm.out.dtype}"
        + (f" with epilogue {gemm.epilogue}" if gemm.epilogue else "")
        + (rule if gemm.a.dtype in FP8 else "")
    )
