"""Products with an epilogue, and products of 8-bit elements."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.blas._conjugate import Operand, plain
from cudatool.blas._gemm import BFLOAT16, FP8, Epilogue, Scales
from cudatool.blas._multiply import check_devices, check_operands, multiply, room_for
from cudatool.blas._numerics import RELU_MASK_BITS
from cudatool.blas._products import added
from cudatool.errors import UsageError
from cudatool.ops._dispatch import op
from cudatool.runtime.array import DeviceArray, check_array, empty
from cudatool.runtime.dtypes import as_dtype

__all__ = ["Fused", "addmm_activation", "int_mm", "mm_epilogue", "scaled_mm"]

addmm_activation = op("cudatool.blas.addmm_activation")
mm_epilogue = op("cudatool.blas.mm_epilogue")
scaled_mm = op("cudatool.blas.scaled_mm")
int_mm = op("cudatool.blas.int_mm")

_WITH_EPILOGUE: Final = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))
_GELU_ALIGNMENT: Final = 8  # elements, of rows of GELU's input (cuBLASLt's rule)
_FP8_ALIGNMENT: Final = 16  # elements
_SCALE_ALIGNMENT: Final = 16  # bytes: cuBLASLt has no algorithm for other addresses


class Fused(NamedTuple):
    """What :func:`mm_epilogue` returns.

    Attributes
    ----------
    out
        The product after the epilogue, ``(m, n)``.
    aux
        What an `aux` epilogue stored for the backward pass, else None.
    bias_gradient
        The sums of the columns of `out`, if the epilogue stores them, else None.
    """

    out: DeviceArray
    aux: DeviceArray | None
    bias_gradient: DeviceArray | None


@addmm_activation.implementation("cuda", "sim")
def _addmm_activation(
    input: DeviceArray,
    mat1: Operand,
    mat2: Operand,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    use_gelu: bool = False,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return ReLU, or GELU (approximated with tanh), of :func:`addmm`, in the product's own kernel.

    Parameters
    ----------
    mat1, mat2
        float16, bfloat16 or float32.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    _check("addmm_activation", mat1, mat2)
    epilogue = Epilogue.GELU if use_gelu else Epilogue.RELU
    shape = (mat1.shape[0], mat2.shape[1])
    return added("addmm_activation", input, mat1, mat2, shape, beta, alpha, out, epilogue)


@mm_epilogue.implementation("cuda", "sim")
def _mm_epilogue(
    input: Operand,
    mat2: Operand,
    epilogue: str,
    *,
    bias: DeviceArray | None = None,
    aux: DeviceArray | None = None,
    out: DeviceArray | None = None,
) -> Fused:
    """Return the product of two matrices after an epilogue of cuBLASLt.

    Parameters
    ----------
    input, mat2
        Shapes ``(m, k)`` and ``(k, n)``; float16, bfloat16 or float32.
    epilogue
        ``"relu"``, ``"gelu"`` (approximated with tanh), ``"bias"``, ``"relu_bias"``, ``"gelu_bias"``; with `aux` in
        the name, as ``"gelu_aux_bias"``, it also stores what the derivative needs. ``"drelu"`` and ``"dgelu"``
        multiply with the derivative; ``"drelu_bgrad"`` and ``"dgelu_bgrad"`` also sum the columns.
    bias
        Shape ``(n)``, if the epilogue adds one.
    aux
        For a derivative: what the epilogue of the forward pass stored. ReLU's is one bit an element, in bytes of
        shape ``(m, columns)``, where rows begin at multiples of 128 bits; GELU's is its input, ``(m, n)``.

    Raises
    ------
    UsageError
        There is no such epilogue; it lacks, or has no use for, `bias` or `aux`; shapes, dtypes or devices do not fit.
    """
    _check("mm_epilogue", input, mat2)
    try:
        chosen = Epilogue(epilogue)
    except ValueError:
        names = ", ".join(sorted(filter(None, Epilogue)))
        raise UsageError(f"mm_epilogue has no epilogue {epilogue!r}; there are {names}") from None
    for name, array, needed in (("bias", bias, chosen.reads_bias), ("aux", aux, chosen.reads_aux)):
        if (array is not None) != needed:
            raise UsageError(f"mm_epilogue: {epilogue} {'needs' if needed else 'does not take'} {name}")
    for array in (bias, aux):
        if array is not None:
            check_array("mm_epilogue: bias or aux", array)
    check_devices("mm_epilogue", input, bias, aux)
    m, n = input.shape[0], mat2.shape[1]
    if bias is not None and (bias.shape, bias.dtype) != ((n,), input.dtype):
        raise UsageError(f"mm_epilogue: bias must have shape {(n,)} and dtype {input.dtype}; it is {bias!r}")
    found = room_for("mm_epilogue", out, (m, n), input.dtype, input.device, input, mat2, bias, aux)
    if chosen.writes_aux or aux is not None:
        room = _room_for_aux(chosen, m, n, input)
        if aux is not None:
            if (aux.shape, aux.dtype) != (room.shape, room.dtype):
                raise UsageError(f"mm_epilogue: aux must have shape {room.shape} and dtype {room.dtype}; it is {aux!r}")
            room = aux if aux.strides == room.strides else room.copy_(aux)
    else:
        room = None
    gradient = empty((n,), input.dtype, device=input.device) if chosen.writes_bias else None
    vector = gradient if bias is None else bias.contiguous()
    multiply(
        input,
        mat2,
        found,
        epilogue=chosen,
        bias=vector,
        aux=room,
    )
    return Fused(found, room if chosen.writes_aux else None, gradient)


def _room_for_aux(epilogue: Epilogue, m: int, n: int, like: Operand) -> DeviceArray:
    if "relu" in epilogue:
        return empty((m, -(-n // RELU_MASK_BITS) * RELU_MASK_BITS // 8), np.uint8, device=like.device)
    return empty((m, -(-n // _GELU_ALIGNMENT) * _GELU_ALIGNMENT), like.dtype, device=like.device)[:, :n]


def _check(name: str, a: Operand, b: Operand) -> None:
    check_operands(name, a, b, 2, 2)
    if a.dtype not in _WITH_EPILOGUE:
        raise UsageError(f"{name} takes float16, bfloat16 or float32, not {a.dtype}")


@scaled_mm.implementation("cuda", "sim")
def _scaled_mm(
    input: DeviceArray,
    mat2: DeviceArray,
    scale_a: DeviceArray,
    scale_b: DeviceArray,
    *,
    bias: DeviceArray | None = None,
    scale_result: DeviceArray | None = None,
    out_dtype: npt.DTypeLike | None = None,
    use_fast_accum: bool = False,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return ``(scale_a * input) @ (scale_b * mat2) + bias`` of 8-bit floating-point matrices.

    Parameters
    ----------
    input, mat2
        Shapes ``(m, k)`` and ``(k, n)``, `k` and `n` multiples of 16; float8_e4m3fn or float8_e5m2, not both
        float8_e5m2. Nothing is copied if the rows of `input` and the columns of `mat2` are contiguous.
    scale_a, scale_b
        One float32 each, in device memory.
    bias
        Shape ``(n)``; bfloat16, or float16 if `out_dtype` is.
    scale_result
        One float32; an 8-bit result is multiplied with it.
    out_dtype
        float16, bfloat16, float32, or one of 8 bits; default: bfloat16.
    use_fast_accum
        Sums may be less exact.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    CudaError
        The device has no 8-bit floating-point products.
    """
    a, _ = plain(input)
    b, _ = plain(mat2)
    if out is not None:
        check_array("scaled_mm: out", out)
    dtype = as_dtype(out_dtype if out_dtype is not None else BFLOAT16 if out is None else out.dtype)
    if a.dtype not in FP8 or b.dtype not in FP8 or a.dtype == b.dtype == FP8[1]:
        raise UsageError(
            f"scaled_mm takes float8_e4m3fn and float8_e5m2, at most one of them float8_e5m2, not {a.dtype} and "
            f"{b.dtype}"
        )
    if dtype not in (*_WITH_EPILOGUE, *FP8):
        raise UsageError(f"scaled_mm: the result can be float16, bfloat16, float32 or 8-bit, not {dtype}")
    if (
        a.ndim != 2
        or b.ndim != 2
        or a.shape[1] != b.shape[0]
        or a.shape[1] % _FP8_ALIGNMENT
        or b.shape[1] % _FP8_ALIGNMENT
    ):
        raise UsageError(
            f"scaled_mm cannot multiply shapes {a.shape} and {b.shape}: pass (m, k) and (k, n), k and n multiples of "
            f"{_FP8_ALIGNMENT}"
        )
    for scale in (scale_a, scale_b, *(() if scale_result is None else (scale_result,))):
        if not isinstance(scale, DeviceArray) or scale.size != 1 or scale.dtype != np.float32:
            raise UsageError(f"scaled_mm: a scale is an array of one float32 in device memory, not {scale!r}")
    if scale_result is not None and dtype not in FP8:
        raise UsageError(f"scaled_mm: scale_result is for a result of 8 bits, not for {dtype}")
    vector = _bias_of_scaled(bias, b.shape[1], dtype)
    check_devices("scaled_mm", a, b, scale_a, scale_b, scale_result, vector)
    found = room_for("scaled_mm", out, (a.shape[0], b.shape[1]), dtype, a.device, a, b)
    return multiply(
        a,
        b,
        found,
        epilogue=Epilogue.NONE if vector is None else Epilogue.BIAS,
        bias=vector,
        scales=Scales(_aligned(scale_a), _aligned(scale_b), None if scale_result is None else _aligned(scale_result)),
        fast_accumulation=use_fast_accum,
    )


def _aligned(scale: DeviceArray) -> DeviceArray:
    return scale.clone() if scale.data_ptr() % _SCALE_ALIGNMENT else scale


def _bias_of_scaled(bias: DeviceArray | None, n: int, dtype: np.dtype[Any]) -> DeviceArray | None:
    if bias is None:
        return None
    wanted = dtype if dtype.char == "e" else BFLOAT16
    if (bias.shape, bias.dtype) != ((n,), wanted) or dtype == np.float32:
        raise UsageError(
            f"scaled_mm: the bias must have shape {(n,)} and dtype {wanted}, and the result not float32; it is {bias!r}"
        )
    return bias.contiguous()


@int_mm.implementation("cuda", "sim")
def _int_mm(input: DeviceArray, mat2: DeviceArray, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the product of two int8 matrices, ``(m, k)`` and ``(k, n)``, as int32; `k` and `n` are multiples of 8.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    a, _ = plain(input)
    b, _ = plain(mat2)
    if a.dtype != np.int8 or b.dtype != np.int8:
        raise UsageError(f"int_mm takes two arrays of int8, not {a.dtype} and {b.dtype}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or a.shape[1] % 8 or b.shape[1] % 8:
        raise UsageError(
            f"int_mm cannot multiply shapes {a.shape} and {b.shape}: pass (m, k) and (k, n), k and n multiples of 8"
        )
    check_devices("int_mm", a, b)
    shape = (a.shape[0], b.shape[1])
    return multiply(a, b, room_for("int_mm", out, shape, np.dtype(np.int32), a.device, a, b))
