"""Adam and AdamW, fused: every array of a group in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cudatool.errors import UsageError
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.dtypes import c_type
from cudatool.runtime.multi_tensor import MultiTensorKernel, check_alike, check_steps, grouped, pointer, scalar_on
from cudatool.runtime.traced_calls import traced

__all__ = ["fused_adam_", "fused_adamw_"]

# The order of operations is that of PyTorch's kernel, and what its compiler fuses is: so the results have its bits.
_SOURCE: Final = """
struct Options {
    double lr, beta1, beta2, weight_decay, eps;
    const float *lr_pointer, *grad_scale, *found_inf;
    int decoupled, maximize;
};

enum { PARAM, GRAD, AVERAGE, AVERAGE_SQUARE, MORE };  // more: largest squares, master, steps

template <typename Param, typename Grad, typename State, bool AMSGRAD, bool MASTER, int ARRAYS>
__global__ void __launch_bounds__(512)
adam(const __grid_constant__ Chunks<5 + AMSGRAD + MASTER, ARRAYS> chunks, const Options options) {
    typedef typename Compute<Param>::type C;
    if (options.found_inf && *options.found_inf != 0) return;
    const C lr = options.lr_pointer ? (C)*options.lr_pointer : (C)options.lr;
    const C beta1 = options.beta1, beta2 = options.beta2, weight_decay = options.weight_decay, eps = options.eps;
    const C scale = options.grad_scale ? (C)*options.grad_scale : C(1);
    const C step = *chunks.template array_of<float>(MORE + AMSGRAD + MASTER);
    const C correction1 = 1 - pow(beta1, step), correction2_root = sqrt(1 - pow(beta2, step));
    const C step_size = lr / correction1;

    Param *params = chunks.template begin<Param>(PARAM);
    Grad *grads = chunks.template begin<Grad>(GRAD);
    State *averages = chunks.template begin<State>(AVERAGE), *squares = chunks.template begin<State>(AVERAGE_SQUARE);
    State *largest = AMSGRAD ? chunks.template begin<State>(MORE) : nullptr;
    State *masters = MASTER ? chunks.template begin<State>(MORE + AMSGRAD) : nullptr;
    const long long size = chunks.size();
    const bool whole = size % 4 == 0 && aligned(params) && aligned(grads) && aligned(averages) && aligned(squares) &&
        aligned(largest) && aligned(masters);

    for (long long i = 4 * threadIdx.x; i < size; i += 4 * blockDim.x) {
        C param[4], grad[4], average[4], square[4], most[4];
        if (MASTER) load(param, masters, i, size, whole); else load(param, params, i, size, whole);
        load(grad, grads, i, size, whole);
        load(average, averages, i, size, whole);
        load(square, squares, i, size, whole);
        if (AMSGRAD) load(most, largest, i, size, whole);
        if (options.grad_scale) {
            #pragma unroll
            for (int k = 0; k < 4; ++k) grad[k] /= scale;
            store(grads, grad, i, size, whole);
        }
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            C g = options.maximize ? -grad[k] : grad[k];
            if (weight_decay != 0) {
                if (options.decoupled) param[k] = fma(-(lr * weight_decay), param[k], param[k]);
                else g = fma(param[k], weight_decay, g);
            }
            average[k] = fma(beta1, average[k], fma(-beta1, g, g));
            square[k] = fma(beta2, square[k], fma(-beta2, g * g, g * g));
            if (AMSGRAD) most[k] = most[k] < square[k] ? square[k] : most[k];
            C root = sqrt(AMSGRAD ? most[k] : square[k]);
            param[k] -= step_size * average[k] / (root / correction2_root + eps);
        }
        store(params, param, i, size, whole);
        store(averages, average, i, size, whole);
        store(squares, square, i, size, whole);
        if (AMSGRAD) store(largest, most, i, size, whole);
        if (MASTER) store(masters, param, i, size, whole);
    }
}
"""
_adam: Final = MultiTensorKernel(
    "adam",
    _SOURCE,
    [
        *((name, "<f8") for name in ("lr", "beta1", "beta2", "weight_decay", "eps")),
        *((name, "<u8") for name in ("lr_pointer", "grad_scale", "found_inf")),
        *((name, "<i4") for name in ("decoupled", "maximize")),
    ],
)


@traced
def fused_adam_(
    params: Sequence[DeviceArray],
    grads: Sequence[DeviceArray],
    exp_avgs: Sequence[DeviceArray],
    exp_avg_sqs: Sequence[DeviceArray],
    max_exp_avg_sqs: Sequence[DeviceArray],
    state_steps: Sequence[DeviceArray],
    *,
    lr: float | DeviceArray,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: DeviceArray | None = None,
    found_inf: DeviceArray | None = None,
    master_params: Sequence[DeviceArray] = (),
) -> None:
    """Take one step of Adam, in place: ``torch._fused_adam_``.

    With g the gradient (divided by `grad_scale`, negated if `maximize`, plus ``weight_decay * param``) and t the step::

        exp_avg    = beta1 * exp_avg    + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        param     -= lr / (1 - beta1**t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps)

    What is computed is float32, or float64 where the parameters are; every result is rounded to its array's dtype.

    Parameters
    ----------
    params, grads
        float32, float64, float16 or bfloat16. Corresponding arrays of all lists have the same shape, the same order
        of elements and no gaps.
    exp_avgs, exp_avg_sqs, max_exp_avg_sqs
        The state, of one of these dtypes. `max_exp_avg_sqs` is used with `amsgrad` alone: the largest `exp_avg_sq` so
        far takes its place in the last formula.
    state_steps
        float32, one element each: t, already advanced to this step, so 1 at the first.
    lr
        Also one float32 on the device, which a captured graph reads again at every replay.
    grad_scale
        One float32 on the device: gradients are divided by it, and stored so.
    found_inf
        One float32 on the device: unless it is 0, nothing changes.
    master_params
        The parameters in the dtype of the state. If given, they are stepped, and `params` are their rounded copies.

    Raises
    ------
    UsageError
        The arrays do not fit each other.
    """
    _step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        master_params,
        (lr, grad_scale, found_inf),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        decoupled=False,
    )


@traced
def fused_adamw_(
    params: Sequence[DeviceArray],
    grads: Sequence[DeviceArray],
    exp_avgs: Sequence[DeviceArray],
    exp_avg_sqs: Sequence[DeviceArray],
    max_exp_avg_sqs: Sequence[DeviceArray],
    state_steps: Sequence[DeviceArray],
    *,
    lr: float | DeviceArray,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: DeviceArray | None = None,
    found_inf: DeviceArray | None = None,
    master_params: Sequence[DeviceArray] = (),
) -> None:
    """Take one step of AdamW, in place: ``torch._fused_adamw_``.

    As :func:`fused_adam_`, but weights decay by themselves and not through the gradient: before anything else,
    ``param -= lr * weight_decay * param``.
    """
    _step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        master_params,
        (lr, grad_scale, found_inf),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        decoupled=True,
    )


def _step(
    params: Sequence[DeviceArray],
    grads: Sequence[DeviceArray],
    exp_avgs: Sequence[DeviceArray],
    exp_avg_sqs: Sequence[DeviceArray],
    max_exp_avg_sqs: Sequence[DeviceArray],
    state_steps: Sequence[DeviceArray],
    master_params: Sequence[DeviceArray],
    scalars: tuple[float | DeviceArray, DeviceArray | None, DeviceArray | None],
    *,
    amsgrad: bool,
    **options: float | bool,
) -> None:
    state = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if amsgrad:
        state["max_exp_avg_sqs"] = max_exp_avg_sqs
    if master_params:
        state["master_params"] = master_params
    lists = check_alike({"params": params, "grads": grads, **state})
    lr, grad_scale, found_inf = scalars
    for group in grouped([*lists, check_steps(state_steps, lists[0])]):
        first = group[0][0]
        kinds = {arrays[0].dtype for arrays in group[2:-1]}
        if len(kinds) > 1:
            raise UsageError(f"the state of one parameter must be of one dtype, not {', '.join(map(str, kinds))}")
        device_lr, scale, inf = (
            scalar_on(first.device, scalar, name)
            for scalar, name in (
                (lr if isinstance(lr, DeviceArray) else None, "lr"),
                (grad_scale, "grad_scale"),
                (found_inf, "found_inf"),
            )
        )
        written = [0, *range(2, len(lists))]
        _adam(
            [
                *(c_type(arrays[0].dtype) for arrays in group[:3]),
                *(str(bool(flag)).lower() for flag in (amsgrad, master_params)),
            ],
            group,
            written=written if scale is None else [*written, 1],
            beside=[scalar for scalar in (device_lr, scale, inf) if scalar is not None],
            lr=0.0 if device_lr is not None else lr,
            lr_pointer=pointer(device_lr),
            grad_scale=pointer(scale),
            found_inf=pointer(inf),
            **options,
        )
