"""Work on lists of arrays in a few launches: scaling, copies, norms, clipping, and what gradient scaling needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray, asarray, check_array, empty
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import c_type, real
from cudatool.runtime.kernel import Kernel, compile_own, launch
from cudatool.runtime.multi_tensor import (
    CHUNK,
    PRELUDE,
    MultiTensorKernel,
    check_alike,
    grouped,
    pointer,
    scalar_on,
)
from cudatool.runtime.stream import current_stream
from cudatool.runtime.traced_calls import traced

__all__ = [
    "amp_foreach_non_finite_check_and_unscale_",
    "amp_update_scale_",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "foreach_add_",
    "foreach_copy_",
    "foreach_scale_",
    "foreach_zero_",
    "get_total_norm",
    "inverse_of",
]

_SOURCE: Final = """
struct MapOptions { double value; const void *pointer; const float *skip; int is_double; };

enum { SCALE, ADD, SET };

// The second list from the first; both may be the same.
template <typename From, typename To, int OPERATION, int ARRAYS>
__global__ void __launch_bounds__(512)
map(const __grid_constant__ Chunks<2, ARRAYS> chunks, const MapOptions options) {
    typedef typename Compute<From>::type C;
    if (options.skip && *options.skip != 0) return;
    const C value = !options.pointer ? options.value
        : options.is_double ? *(const double *)options.pointer : *(const float *)options.pointer;
    const From *from = chunks.template begin<From>(0);
    To *to = chunks.template begin<To>(1);
    const long long size = chunks.size();
    const bool whole = size % 4 == 0 && aligned(from) && aligned(to);
    for (long long i = 4 * threadIdx.x; i < size; i += 4 * blockDim.x) {
        C x[4];
        if (OPERATION != SET) load(x, from, i, size, whole);
        #pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = OPERATION == SCALE ? x[k] * value : OPERATION == ADD ? x[k] + value : value;
        store(to, x, i, size, whole);
    }
}

struct UnscaleOptions { const float *inverse; float *found; };

template <typename T, int ARRAYS>
__global__ void __launch_bounds__(512)
unscale(const __grid_constant__ Chunks<1, ARRAYS> chunks, const UnscaleOptions options) {
    typedef typename Compute<T>::type C;
    const C inverse = *options.inverse;
    T *grads = chunks.template begin<T>(0);
    const long long size = chunks.size();
    const bool whole = size % 4 == 0 && aligned(grads);
    for (long long i = 4 * threadIdx.x; i < size; i += 4 * blockDim.x) {
        C grad[4];
        load(grad, grads, i, size, whole);
        bool finite = true;
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            finite &= isfinite(grad[k]);
            grad[k] *= inverse;
        }
        if (!finite) atomicExch(options.found, 1);  // many threads may say so
        if (inverse != 1) store(grads, grad, i, size, whole);
    }
}

// A norm is a sum of powers, or a largest value, in which NaN counts as the largest.
__device__ double joined(double a, double b, double p) { return !isinf(p) ? a + b : b > a || isnan(b) ? b : a; }

// For thread 0: what all threads of the block have.
__device__ double joined_by_block(double own, double p) {
    __shared__ double parts[512];
    for (int half = blockDim.x / 2; half; half /= 2) {
        parts[threadIdx.x] = own;
        __syncthreads();
        if (threadIdx.x < half) own = joined(own, parts[threadIdx.x + half], p);
        __syncthreads();
    }
    return own;
}

struct NormOptions { double p; double *parts; };

template <typename T, int ARRAYS>
__global__ void __launch_bounds__(512)
norm_parts(const __grid_constant__ Chunks<1, ARRAYS> chunks, const NormOptions options) {
    typedef typename Compute<T>::type C;
    const T *from = chunks.template begin<T>(0);
    const long long size = chunks.size();
    const bool whole = size % 4 == 0 && aligned(from);
    const double p = options.p;
    double own = 0;
    for (long long i = 4 * threadIdx.x; i < size; i += 4 * blockDim.x) {
        C x[4];
        load(x, from, i, size, whole);
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            double size_of = fabs((double)x[k]);
            own = joined(own, isinf(p) || p == 1 ? size_of : p == 2 ? size_of * size_of : pow(size_of, p), p);
        }
    }
    own = joined_by_block(own, p);
    if (threadIdx.x == 0) options.parts[chunks.first_block + blockIdx.x] = own;
}

template <typename T> __global__ void __launch_bounds__(512)
norm_total(const double *parts, int count, double p, T *total) {
    double own = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) own = joined(own, parts[i], p);
    own = joined_by_block(own, p);
    if (threadIdx.x == 0) *total = isinf(p) || p == 1 ? own : p == 2 ? sqrt(own) : pow(own, 1 / p);
}

template <typename T> __global__ void clip_coefficient(const T *total, double most, double *coefficient) {
    double ratio = most / (*total + 1e-6);
    *coefficient = ratio > 1 ? 1 : ratio;  // also NaN stays
}

// By way of double, so that the inverse is rounded once.
__global__ void inverse(const float *scale, float *result) { *result = 1 / (double)*scale; }

__global__ void update_scale(
    float *scale, int *tracker, const float *found_inf, double growth, double backoff, int interval
) {
    if (*found_inf != 0) {
        *scale = *scale * backoff;
        *tracker = 0;
    } else if (*tracker + 1 == interval) {
        float grown = *scale * growth;
        if (isfinite(grown)) *scale = grown;
        *tracker = 0;
    } else {
        ++*tracker;
    }
}
"""
_SCALE, _ADD, _SET = range(3)
_map: Final = MultiTensorKernel(
    "map", _SOURCE, [("value", "<f8"), ("pointer", "<u8"), ("skip", "<u8"), ("is_double", "<i4")]
)
_unscale: Final = MultiTensorKernel("unscale", _SOURCE, [("inverse", "<u8"), ("found", "<u8")])
_norm_parts: Final = MultiTensorKernel("norm_parts", _SOURCE, [("p", "<f8"), ("parts", "<u8")])


@functools.cache
def _kernel(name: str, device: int) -> Kernel:
    with on_device(device):
        return compile_own(PRELUDE + _SOURCE, name)


def _map_lists(
    operation: int,
    sources: Sequence[DeviceArray],
    targets: Sequence[DeviceArray],
    value: float | DeviceArray,
    found_inf: DeviceArray | None = None,
) -> None:
    for from_, to in grouped(check_alike({"arrays": sources, "results": targets})):
        device = from_[0].device
        scalar = _factor_on(device, value) if isinstance(value, DeviceArray) else None
        skip = scalar_on(device, found_inf, "found_inf")
        _map(
            [c_type(from_[0].dtype), c_type(to[0].dtype), str(operation)],
            [from_, to],
            written=[1],
            beside=[array for array in (scalar, skip) if array is not None],
            value=0.0 if scalar is not None else value,
            pointer=pointer(scalar),
            skip=pointer(skip),
            is_double=scalar is not None and scalar.dtype == np.float64,
        )


def _factor_on(device: int, factor: DeviceArray) -> DeviceArray:
    if factor.size == 1 and factor.dtype == np.float64:
        return asarray(factor, device=device)
    found = scalar_on(device, factor, "the factor")
    assert found is not None
    return found


@traced
def foreach_scale_(arrays: Sequence[DeviceArray], factor: float | DeviceArray) -> None:
    """Multiply every array by a factor, in place: ``torch._foreach_mul_``.

    Parameters
    ----------
    arrays
        float32, float64, float16 or bfloat16, without gaps.
    factor
        A number, or one float32 or float64 on the device.

    Raises
    ------
    UsageError
        One of the arrays is none of these.
    """
    _map_lists(_SCALE, arrays, arrays, factor)


@traced
def foreach_add_(
    arrays: Sequence[DeviceArray], value: float | DeviceArray, *, found_inf: DeviceArray | None = None
) -> None:
    """Add a number to every element of every array, in place: ``torch._foreach_add_``.

    Parameters
    ----------
    arrays, value
        As of :func:`foreach_scale_`.
    found_inf
        One float32 on the device: unless it is 0, nothing changes.
    """
    _map_lists(_ADD, arrays, arrays, value, found_inf)


@traced
def foreach_copy_(arrays: Sequence[DeviceArray], sources: Sequence[DeviceArray]) -> None:
    """Copy each source into the array at its place, cast to its dtype: ``torch._foreach_copy_``."""
    _map_lists(_SCALE, sources, arrays, 1.0)


@traced
def foreach_zero_(arrays: Sequence[DeviceArray]) -> None:
    """Set every element of every array to 0: ``torch._foreach_zero_``."""
    _map_lists(_SET, arrays, arrays, 0.0)


@traced
def get_total_norm(
    tensors: Sequence[DeviceArray], norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> DeviceArray:
    """Return the norm of all elements of all arrays: ``torch.nn.utils.get_total_norm``.

    Powers are summed in float64, in an order that depends on the sizes of the arrays only.

    Parameters
    ----------
    tensors
        float32, float64, float16 or bfloat16, without gaps, on one device.
    norm_type
        p of the p-norm, above 0; infinity for the largest absolute value.
    error_if_nonfinite
        Wait for the result, and raise if it is infinite or NaN.

    Returns
    -------
    DeviceArray
        Without dimensions; float64 if one of the arrays is, else float32.

    Raises
    ------
    UsageError
        The arrays are none of these, or the norm is not finite and must be.
    """
    p = float(real("norm_type", norm_type))
    if not p > 0:
        raise UsageError(f"norm_type must be above 0, not {norm_type}")
    (checked,) = check_alike({"tensors": tensors})
    devices = {device for device, _ in checked.kinds}
    if len(devices) > 1:
        raise UsageError(f"the arrays are on devices {sorted(devices)}; take the norm of each device's by itself")
    device = devices.pop() if devices else None
    exact = any(dtype == np.float64 for _, dtype in checked.kinds)
    total = empty((), np.float64 if exact else np.float32, device=device)
    groups = [group for (group,) in grouped([checked])]
    counts = [sum(-(-size // CHUNK) for size in group.sizes) for group in groups]
    if not sum(counts):
        return total.fill_(0)
    parts = empty(sum(counts), np.float64, device=device)
    start = 0
    for group, count in zip(groups, counts, strict=True):
        own = parts[start : start + count]
        _norm_parts([c_type(group[0].dtype)], [group], written=[], beside=[own], p=p, parts=pointer(own))
        start += count
    kernel = _kernel(f"norm_total<{c_type(total.dtype)}>", total.device)
    config = calls.core.LaunchConfig(grid=1, block=512)
    launch(current_stream(device), config, kernel, parts, parts.size, p, total)
    if error_if_nonfinite and not math.isfinite(float(total.get())):
        raise UsageError(
            f"the {norm_type} norm of the gradients is {total.get()}, so they cannot be clipped; "
            "pass error_if_nonfinite=False to go on"
        )
    return total


@traced
def clip_grads_with_norm_(grads: Sequence[DeviceArray], max_norm: float, total_norm: DeviceArray) -> None:
    """Multiply gradients by ``min(1, max_norm / (total_norm + 1e-6))``, in place.

    ``torch.nn.utils.clip_grads_with_norm_``: nothing is waited for.

    Parameters
    ----------
    total_norm
        What :func:`get_total_norm` returned.
    """
    check_array("clip_grads_with_norm_", total_norm)
    max_norm = float(real("max_norm", max_norm))
    coefficient = empty((), np.float64, device=total_norm.device)
    kernel = _kernel(f"clip_coefficient<{c_type(total_norm.dtype)}>", total_norm.device)
    config = calls.core.LaunchConfig(grid=1, block=1)
    launch(current_stream(total_norm.device), config, kernel, total_norm, max_norm, coefficient)
    foreach_scale_(grads, coefficient)


@traced
def clip_grad_norm_(
    grads: Sequence[DeviceArray], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> DeviceArray:
    """Scale gradients down, in place, so that their total norm is at most `max_norm`, and return what it was.

    ``torch.nn.utils.clip_grad_norm_`` of gradients that are passed; parameters as of :func:`get_total_norm`.
    """
    total = get_total_norm(grads, norm_type, error_if_nonfinite)
    clip_grads_with_norm_(grads, max_norm, total)
    return total


@traced
def amp_foreach_non_finite_check_and_unscale_(
    grads: Sequence[DeviceArray], found_inf: DeviceArray, inv_scale: DeviceArray
) -> None:
    """Multiply gradients by `inv_scale`, in place, and set `found_inf` to 1 if one is infinite or NaN.

    ``torch._amp_foreach_non_finite_check_and_unscale_``. A `found_inf` that is 1 already stays so.

    Parameters
    ----------
    grads
        float32, float64, float16 or bfloat16, without gaps, on one device.
    found_inf, inv_scale
        One float32 each, on that device.
    """
    for (group,) in grouped(check_alike({"grads": grads})):
        found, inverse = _scalar_at(group[0], found_inf, "found_inf"), _scalar_at(group[0], inv_scale, "inv_scale")
        _unscale(
            [c_type(group[0].dtype)],
            [group],
            written=[0],
            beside=[found, inverse],
            inverse=pointer(inverse),
            found=pointer(found),
        )


def inverse_of(scale: DeviceArray) -> DeviceArray:
    """Return 1 over one float32 on the device."""
    result = empty((), device=scale.device)
    config = calls.core.LaunchConfig(grid=1, block=1)
    launch(current_stream(scale.device), config, _kernel("inverse", scale.device), scale, result)
    return result


@traced
def amp_update_scale_(
    current_scale: DeviceArray,
    growth_tracker: DeviceArray,
    found_inf: DeviceArray,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> DeviceArray:
    """Update the scale of gradients, in place, by whether they were finite: ``torch._amp_update_scale_``. ::

        if found_inf:                                    scale *= backoff;  tracker = 0
        elif tracker + 1 == interval:                    scale *= growth;   tracker = 0
        else:                                                               tracker += 1

    A scale that would not be finite does not grow.

    Parameters
    ----------
    current_scale, found_inf
        One float32 each.
    growth_tracker
        One int32, on the same device.

    Returns
    -------
    DeviceArray
        `current_scale`.
    """
    for array in (current_scale, growth_tracker, found_inf):
        check_array("amp_update_scale_", array)
    if growth_tracker.size != 1 or growth_tracker.dtype != np.int32 or growth_tracker.device != current_scale.device:
        raise UsageError(f"growth_tracker must be one int32 on device {current_scale.device}, not {growth_tracker!r}")
    found = _scalar_at(current_scale, found_inf, "found_inf")
    launch(
        current_stream(current_scale.device),
        calls.core.LaunchConfig(grid=1, block=1),
        _kernel("update_scale", current_scale.device),
        _scalar_at(current_scale, current_scale, "current_scale"),
        growth_tracker,
        found,
        float(scale_growth_factor),
        float(scale_backoff_factor),
        growth_interval,
    )
    return current_scale


def _scalar_at(array: DeviceArray, scalar: DeviceArray, name: str) -> DeviceArray:
    """Return the scalar, which must be on the device of the array."""
    if scalar.device != array.device:
        raise UsageError(f"{name} is on device {scalar.device}, the arrays on device {array.device}")
    found = scalar_on(array.device, scalar, name)
    assert found is not None
    return found
