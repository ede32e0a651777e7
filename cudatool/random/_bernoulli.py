"""Events that happen with a given probability, and dropout, which is made of them."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._pointwise import Pointwise
from cudatool.random._generator import Generator
from cudatool.random._kernels import BLOCK, PHILOX, blocks, draws, fill, operation, real_type, run, take, word_type
from cudatool.random._layout import by_strides, empty_like, in_memory_order
from cudatool.runtime.array import DeviceArray, check_array, check_writeable, empty
from cudatool.runtime.dtypes import real
from cudatool.runtime.stream import current_stream

__all__ = ["bernoulli", "bernoulli_", "dropout", "native_dropout", "native_dropout_backward"]

_EACH: Final = (
    PHILOX
    + r"""
// Element i happens with probability p[i]; a thread takes four neighbours and one block of the counter.
template <typename T, typename P>
__global__ void each(T *out, const P *p, long long size, Word64 seed, Word64 offset, const Word64 *place) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    uint4 x = Philox(thread, seed, offset, place).next();
    float numbers[4] = {unit(x.x), unit(x.y), unit(x.z), unit(x.w)};
    for (int k = 0; k < 4; ++k) {
        long long i = 4 * thread + k;
        if (i >= size) return;
        if (!(0 <= p[i] && p[i] <= 1)) __trap();
        out[i] = T(float(numbers[k] <= p[i]));
    }
}
"""
)
_EACH_BLOCK: Final = 512
_EACH_DRAWS: Final = 10


@operation
def bernoulli_(array: DeviceArray, p: Any = 0.5, *, generator: Generator | None = None) -> DeviceArray:
    """Fill an array with 1 where an event of probability `p` happens, else 0, and return it.

    Parameters
    ----------
    p
        A number, or an array of floating-point numbers, which is broadcast. One of its elements that is not in [0, 1]
        stops the kernel: the next synchronization raises, and the context cannot be used again.

    Raises
    ------
    UsageError
        `p` is not in [0, 1], or has another dtype or is on another device, or the array cannot be filled.
    ShapeError
        The shapes do not fit.
    """
    check_array("bernoulli_", array)
    name = word_type(array.dtype, "bernoulli_")
    if isinstance(p, DeviceArray):
        return _each(array, name, p, generator)
    if not 0 <= real("bernoulli_: p", p) <= 1:
        raise UsageError(f"bernoulli_ expects p to be in [0, 1], not {p}")
    return fill(array, f"Bernoulli<{name}>", 2 if name == "double" else 4, float(p), 0.0, generator)


def _each(array: DeviceArray, name: str, p: DeviceArray, generator: Generator | None) -> DeviceArray:
    real_type(p.dtype, "the p of bernoulli_")
    check_writeable(array)
    _same_device(array, p)
    exact = np.float64 if name == "double" else np.float32
    if p.dtype != exact:
        p = empty_like(p, exact).copy_(p)
    p = p.broadcast_to(array.shape)
    if not array.size:
        return array
    stream = current_stream(array.device)
    drawn = take(generator, _EACH_DRAWS, stream)
    order = _common_order(array, p)
    out, p = array.transpose(order), p.transpose(order).contiguous()
    filled = out if out.is_contiguous() else empty(out.shape, out.dtype, device=out.device)
    grid = -(-out.size // (4 * _EACH_BLOCK))
    kernel = f"each<{name}, {'double' if name == 'double' else 'float'}>"
    run(_EACH, kernel, grid, _EACH_BLOCK, stream, filled, p, out.size, *drawn)
    if filled is not out:
        out.copy_(filled)
    return array


def _same_device(one: DeviceArray, other: DeviceArray) -> None:
    if one.device != other.device:
        raise UsageError(f"the arrays are on devices {one.device} and {other.device}; copy one of them to the other's")


def _common_order(a: DeviceArray, b: DeviceArray) -> list[int]:
    """Return the dimensions in an order of falling steps, if both arrays agree on one."""
    order = list(range(a.ndim))
    for i in range(a.ndim):
        for j in range(i + 1, a.ndim):
            first, second = order[i], order[j]
            if 1 in (a.shape[first], a.shape[second]):
                continue
            steps = [(x.strides[first] // x.dtype.itemsize, x.strides[second] // x.dtype.itemsize) for x in (a, b)]
            if any(x < y for x, y in steps) and not any(x > y for x, y in steps):
                order[i], order[j] = second, first
    return order


@operation
def bernoulli(
    input: DeviceArray, p: float | None = None, *, generator: Generator | None = None, out: DeviceArray | None = None
) -> DeviceArray:
    """Return 1 where an event happens, else 0.

    Parameters
    ----------
    input
        The probabilities; with `p`, an array whose shape and dtype the result has.
    p
        One probability for all.
    out
        Fill this array instead of a new one.

    Raises
    ------
    UsageError
        A probability is not in [0, 1], or `input` is not floating-point and `p` is missing, or `out` does not fit.
    """
    check_array("bernoulli", input)
    out = empty_like(input) if out is None else out
    check_array("bernoulli: out", out)
    if out.shape != input.shape:
        raise UsageError(f"out has shape {out.shape}, the probabilities {input.shape}")
    bernoulli_(out, input if p is None else p, generator=generator)
    return out


_DROPOUT: Final = (
    PHILOX
    + r"""
// Element i is kept with probability p, and then scaled by 1 / p. A thread takes `Width` neighbours at a time, which
// one load can get; with a width of 1, as `fill` does, four elements that lie as far apart as there are threads.
template <typename T, int Width> struct alignas(Width * sizeof(T)) Vector { unsigned char bytes[Width * sizeof(T)]; };

template <typename T, int Width>
__global__ void dropout(const T *in, T *out, bool *mask, long long size, double keep, Word64 seed, Word64 offset,
                        const Word64 *place) {
    typedef typename Real<T>::type Number;
    const Number p = keep, scale = 1.0 / p;
    long long threads = (long long)gridDim.x * blockDim.x;
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    Philox philox(thread, seed, offset, place);
    const int count = Width == 1 ? 4 : Width;
    long long step = Width == 1 ? threads : 1;
    for (long long at = thread * Width; at < size; at += threads * count) {
        uint4 x[(count + 3) / 4];
        for (uint4 &one : x) one = philox.next();
        const unsigned *words = &x[0].x;
        alignas(16) unsigned char elements[count * sizeof(T)], kept[count];
        if (Width > 1) *(Vector<T, Width> *)elements = *(const Vector<T, Width> *)(in + at);
        #pragma unroll
        for (int k = 0; k < count; ++k) {
            T *element = (T *)elements + k;
            if (Width == 1) {
                if (at + step * k >= size) break;
                *element = in[at + step * k];
            }
            bool keeps = unit(words[k]) < p;
            *element = T(Number(*element) * (float)keeps * scale);
            kept[k] = keeps;
            if (Width == 1) {
                out[at + step * k] = *element;
                mask[at + step * k] = keeps;
            }
        }
        if (Width > 1) {
            *(Vector<T, Width> *)(out + at) = *(Vector<T, Width> *)elements;
            *(Vector<bool, Width> *)(mask + at) = *(Vector<bool, Width> *)kept;
        }
    }
}
"""
)


_dropout_backward: Final = Pointwise(
    "dropout_backward(grad_output, mask: bool, *, scale=1.0)", "Compute(mask) * grad_output * scale", accepts=("float",)
)


@operation
def dropout(
    input: DeviceArray, p: float = 0.5, training: bool = True, *, generator: Generator | None = None
) -> DeviceArray:
    """Return an array with each element set to 0 with probability `p`, and the others scaled by ``1 / (1 - p)``.

    Parameters
    ----------
    training
        False returns the array itself.

    Raises
    ------
    UsageError
        `p` is not in [0, 1], or the dtype is no floating-point one.
    """
    check_array("dropout", input)
    if not 0 <= real("dropout: p", p) <= 1:
        raise UsageError(f"dropout expects p to be in [0, 1], not {p}")
    if not training or p == 0 or not input.size:
        return input
    return native_dropout(input, p, generator=generator)[0]  # type: ignore[no-any-return]


@operation
def native_dropout(
    input: DeviceArray, p: float, train: bool | None = True, *, generator: Generator | None = None
) -> tuple[DeviceArray, DeviceArray]:
    """Return what :func:`dropout` does, and the mask of what was kept, which :func:`native_dropout_backward` takes.

    Raises
    ------
    UsageError
        `p` is not in [0, 1], or the dtype is no floating-point one.
    """
    check_array("native_dropout", input)
    name = real_type(input.dtype, "dropout")
    if not 0 <= real("native_dropout: p", p) <= 1:
        raise UsageError(f"dropout expects p to be in [0, 1], not {p}")
    if train is False:
        return input.clone(), empty_like(input, np.bool).fill_(True)
    if p == 1:
        return empty_like(input).fill_(0), empty_like(input, np.bool).fill_(False)
    out, mask = empty_like(input), empty_like(input, np.bool)
    if not input.size:
        return out, mask
    stream, size = current_stream(input.device), input.size
    drawn = take(generator, draws(size, 4, input.device), stream)
    arrays = [input, out, mask]
    ordered = in_memory_order(input)
    width = _width(input) if ordered.is_contiguous() else 1
    if width > 1:
        arrays = [ordered, *(array.transpose(by_strides(array)) for array in arrays[1:])]
    flat = [array if array.is_contiguous() else array.contiguous() for array in arrays]
    grid = blocks(size, input.device)
    run(_DROPOUT, f"dropout<{name}, {width}>", grid, BLOCK, stream, *flat, size, 1.0 - p, *drawn)
    for array, made in zip(arrays[1:], flat[1:], strict=True):
        if made is not array:
            array.copy_(made)
    return out, mask


def _width(array: DeviceArray) -> int:
    """Return how many neighbours a thread takes at a time: as many as 16 bytes hold, if address and size allow it."""
    width = 16 // array.dtype.itemsize
    return math.gcd(width, array.size, array.data_ptr() // array.dtype.itemsize)


@operation
def native_dropout_backward(grad_output: DeviceArray, mask: DeviceArray, scale: float) -> DeviceArray:
    """Return the gradient of what went into a dropout: that of what came out where the mask is true, scaled, else 0.

    Parameters
    ----------
    mask
        The second result of :func:`native_dropout`; bool, of the same shape.
    scale
        ``1 / (1 - p)``.

    Raises
    ------
    UsageError
        Shapes or dtypes do not fit.
    """
    check_array("native_dropout_backward", grad_output)
    check_array("native_dropout_backward", mask)
    real_type(grad_output.dtype, "dropout")
    if mask.dtype != np.bool or mask.shape != grad_output.shape:
        raise UsageError(f"the mask is bool and has shape {grad_output.shape}; this has {mask.dtype} and {mask.shape}")
    _same_device(grad_output, mask)
    return _dropout_backward(grad_output, mask, scale=float(scale))
