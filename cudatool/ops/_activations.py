"""Activation functions and their gradients, as lines of the table of elementwise operations."""

from __future__ import annotations

from typing import Final

from cudatool.ops._dispatch import KINDS, op
from cudatool.ops._elementwise import elementwise, one_of
from cudatool.ops._pointwise import Pointwise, Result
from cudatool.runtime.array import DeviceArray

__all__ = [
    "elu",
    "gelu",
    "gelu_backward",
    "leaky_relu",
    "relu",
    "sigmoid",
    "sigmoid_backward",
    "silu",
    "silu_backward",
    "softplus",
    "tanh_backward",
    "threshold_backward",
]

_FLOAT: Final = ("float",)
_INEXACT: Final = ("float", "complex")

relu = elementwise("relu(input)", "input < 0 ? 0 : input", "Return input, or 0 where it is negative.")
leaky_relu = elementwise(
    "leaky_relu(input, *, negative_slope=0.01)",
    "input > 0 ? input : input * negative_slope",
    "Return input, or negative_slope * input where it is negative.",
    accepts=_FLOAT,
)
elu = elementwise(
    "elu(input, *, alpha=1.0)",
    "input > 0 ? input : alpha * expm1(input)",
    "Return input, or alpha * (exp(input) - 1) where it is negative.",
    accepts=_FLOAT,
)
sigmoid = elementwise(
    "sigmoid(input)", "1 / (1 + exp(-input))", "Return 1 / (1 + exp(-input)).", result=Result.FLOAT, accepts=_INEXACT
)
silu = elementwise("silu(input)", "input / (1 + exp(-input))", "Return input * sigmoid(input).", accepts=_INEXACT)
softplus = elementwise(
    "softplus(input, *, beta=1.0, threshold=20.0)",
    "input * beta > threshold ? input : log1p(exp(input * beta)) / beta",
    "Return log(1 + exp(beta * input)) / beta, or input where beta * input is above threshold.",
    accepts=_FLOAT,
)
_gelu = {
    "none": Pointwise("gelu(input)", "input / 2 * (1 + erf(input * Compute(0.70710678118654752440)))", accepts=_FLOAT),
    "tanh": Pointwise(
        "gelu_tanh(input)",
        "input / 2 * (1 + tanh(Compute(0.79788456080286535588) * (input + Compute(0.044715) * input * input * input)))",
        accepts=_FLOAT,
    ),
}
# phi is the normal distribution's density, its integral Phi: gelu(x) = x Phi(x), with gradient Phi(x) + x phi(x).
_gelu_backward = {
    "none": Pointwise(
        "gelu_backward(grad_output, input)",
        "grad_output * ((1 + erf(input * Compute(0.70710678118654752440))) / 2"
        " + input * Compute(0.39894228040143267794) * exp(-input * input / 2))",
        accepts=_FLOAT,
    ),
    "tanh": Pointwise(
        "gelu_tanh_backward(grad_output, input)",
        "gelu_tanh_gradient(input) * grad_output",
        accepts=_FLOAT,
        functions="""
__device__ Compute gelu_tanh_gradient(Compute x) {
    const Compute scale = 0.79788456080286535588, cubic = 0.044715;
    Compute t = tanh(scale * (x + cubic * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * scale * (1 + 3 * cubic * x * x);
}""",
    ),
}
_BACKWARD: Final = "The gradient for its input, from the gradient for its output"
sigmoid_backward = elementwise(
    "sigmoid_backward(grad_output, output)",
    "grad_output * (1 - output) * output",
    f"{_BACKWARD} and the output of sigmoid.",
    accepts=_FLOAT,
)
tanh_backward = elementwise(
    "tanh_backward(grad_output, output)",
    "grad_output * (1 - output * output)",
    f"{_BACKWARD} and the output of tanh.",
    accepts=_FLOAT,
)
silu_backward = elementwise(
    "silu_backward(grad_output, input)",
    "grad_output / (1 + exp(-input)) * (1 + input * (1 - 1 / (1 + exp(-input))))",
    f"{_BACKWARD} and the input of silu.",
    accepts=_FLOAT,
)
threshold_backward = elementwise(
    "threshold_backward(grad_output, input, *, threshold=0)",
    "input <= threshold ? 0 : grad_output",
    f"{_BACKWARD} and the input (or output) of relu.",
)
gelu = op("cudatool.ops.gelu")
gelu_backward = op("cudatool.ops.gelu_backward")


@gelu.implementation(*KINDS)
def _(input: DeviceArray, approximate: str = "none", *, out: DeviceArray | None = None) -> DeviceArray:
    """Return input times the share of a normal distribution that is below it.

    Parameters
    ----------
    approximate
        ``"none"``: exact, by erf; ``"tanh"``: the approximation by tanh.
    """
    return one_of(_gelu, approximate, "approximate")(input, out=out)


@gelu_backward.implementation(*KINDS)
def _(
    grad_output: DeviceArray, input: DeviceArray, approximate: str = "none", *, out: DeviceArray | None = None
) -> DeviceArray:
    """Return the gradient for gelu's input, from the gradient for its output and the input."""
    return one_of(_gelu_backward, approximate, "approximate")(grad_output, input, out=out)
