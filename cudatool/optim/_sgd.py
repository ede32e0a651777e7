"""SGD with momentum, fused: every array of a group in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cudatool.errors import UsageError
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.dtypes import c_type
from cudatool.runtime.multi_tensor import MultiTensorKernel, check_alike, check_steps, grouped, pointer, scalar_on
from cudatool.runtime.traced_calls import traced

__all__ = ["fused_sgd_"]

# The order of operations is that of PyTorch's kernel, which leaves it to its compiler what is fused.
_SOURCE: Final = """
struct Options {
    double lr, weight_decay, momentum, dampening;
    const float *lr_pointer, *grad_scale, *found_inf;
    int nesterov, maximize, first_step;
};

enum { PARAM, GRAD, MORE };

template <typename Param, typename Grad, typename State, bool MOMENTUM, bool MASTER, bool STEPS, int ARRAYS>
__global__ void __launch_bounds__(512)
sgd(const __grid_constant__ Chunks<2 + MOMENTUM + MASTER + STEPS, ARRAYS> chunks, const Options options) {
    typedef typename Compute<Param>::type C;
    if (options.found_inf && *options.found_inf != 0) return;
    const C lr = options.lr_pointer ? (C)*options.lr_pointer : (C)options.lr;
    const C weight_decay = options.weight_decay, factor = options.momentum, dampening = options.dampening;
    const C scale = options.grad_scale ? (C)*options.grad_scale : C(1);

    const bool first_step =
        options.first_step || (STEPS && *chunks.template array_of<float>(MORE + MOMENTUM + MASTER) == 0);

    Param *params = chunks.template begin<Param>(PARAM);
    Grad *grads = chunks.template begin<Grad>(GRAD);
    State *momenta = MOMENTUM ? chunks.template begin<State>(MORE) : nullptr;
    State *masters = MASTER ? chunks.template begin<State>(MORE + MOMENTUM) : nullptr;
    const long long size = chunks.size();
    const bool whole = size % 4 == 0 && aligned(params) && aligned(grads) && aligned(momenta) && aligned(masters);

    for (long long i = 4 * threadIdx.x; i < size; i += 4 * blockDim.x) {
        C param[4], grad[4], momentum[4];
        if (MASTER) load(param, masters, i, size, whole); else load(param, params, i, size, whole);
        load(grad, grads, i, size, whole);
        if (MOMENTUM) load(momentum, momenta, i, size, whole);
        if (options.grad_scale) {
            #pragma unroll
            for (int k = 0; k < 4; ++k) grad[k] /= scale;
            store(grads, grad, i, size, whole);
        }
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            C g = options.maximize ? -grad[k] : grad[k];
            if (weight_decay != 0) g = fma(weight_decay, param[k], g);
            if (MOMENTUM) {
                momentum[k] = first_step ? g : fma(1 - dampening, g, factor * momentum[k]);
                g = options.nesterov ? fma(factor, momentum[k], g) : momentum[k];
            }
            param[k] = fma(-lr, g, param[k]);
        }
        store(params, param, i, size, whole);
        if (MOMENTUM) store(momenta, momentum, i, size, whole);
        if (MASTER) store(masters, param, i, size, whole);
    }
}
"""
_sgd: Final = MultiTensorKernel(
    "sgd",
    _SOURCE,
    [
        *((name, "<f8") for name in ("lr", "weight_decay", "momentum", "dampening")),
        *((name, "<u8") for name in ("lr_pointer", "grad_scale", "found_inf")),
        *((name, "<i4") for name in ("nesterov", "maximize", "first_step")),
    ],
)


@traced
def fused_sgd_(
    params: Sequence[DeviceArray],
    grads: Sequence[DeviceArray],
    momentum_buffer_list: Sequence[DeviceArray],
    *,
    weight_decay: float,
    momentum: float,
    lr: float | DeviceArray,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: DeviceArray | None = None,
    found_inf: DeviceArray | None = None,
    master_params: Sequence[DeviceArray] = (),
    state_steps: Sequence[DeviceArray] = (),
) -> None:
    """Take one step of SGD, in place: ``torch._fused_sgd_``.

    With g the gradient (divided by `grad_scale`, negated if `maximize`, plus ``weight_decay * param``)::

        buffer = g if is_first_step else momentum * buffer + (1 - dampening) * g
        g      = g + momentum * buffer if nesterov else buffer
        param -= lr * g

    Parameters
    ----------
    momentum_buffer_list
        Empty where `momentum` is 0, and only there.
    lr, grad_scale, found_inf, master_params
        As of :func:`fused_adam_`, and so are the dtypes and what fits each other.
    state_steps
        float32, one element each: how many steps a parameter has seen. If given, the step is the first of those where
        this is 0, whatever `is_first_step` says; a captured graph looks again at every replay.

    Raises
    ------
    UsageError
        The arrays do not fit each other.
    """
    if bool(momentum) != bool(momentum_buffer_list) and params:
        raise UsageError(
            f"momentum is {momentum} and momentum_buffer_list has {len(momentum_buffer_list)} arrays; "
            "pass one for each parameter with a momentum, none without"
        )
    state = {}
    if momentum_buffer_list:
        state["momentum_buffer_list"] = momentum_buffer_list
    if master_params:
        state["master_params"] = master_params
    lists = check_alike({"params": params, "grads": grads, **state})
    for group in grouped([*lists, check_steps(state_steps, lists[0])] if state_steps else lists):
        first = group[0][0]
        kinds = {arrays[0].dtype for arrays in group[2 : len(lists)]} or {first.dtype}
        if len(kinds) > 1:
            raise UsageError(f"the state of one parameter must be of one dtype, not {', '.join(map(str, kinds))}")
        device_lr = scalar_on(first.device, lr, "lr") if isinstance(lr, DeviceArray) else None
        scale = scalar_on(first.device, grad_scale, "grad_scale")
        inf = scalar_on(first.device, found_inf, "found_inf")
        written = [0, *range(2, len(lists))]
        _sgd(
            [
                *(c_type(dtype) for dtype in (first.dtype, group[1][0].dtype, *kinds)),
                *(str(bool(flag)).lower() for flag in (momentum_buffer_list, master_params, state_steps)),
            ],
            group,
            written=written if scale is None else [*written, 1],
            beside=[scalar for scalar in (device_lr, scale, inf) if scalar is not None],
            lr=0.0 if device_lr is not None else lr,
            weight_decay=weight_decay,
            momentum=momentum,
            dampening=dampening,
            lr_pointer=pointer(device_lr),
            grad_scale=pointer(scale),
            found_inf=pointer(inf),
            nesterov=nesterov,
            maximize=maximize,
            first_step=is_first_step,
        )
