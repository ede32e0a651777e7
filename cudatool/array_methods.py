"""What arrays can compute: Python's operators and torch's methods, by the operations of :mod:`cudatool.ops`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from cudatool.errors import UsageError
from cudatool.runtime.dtypes import is_number

__all__ = ["ArrayMethods"]

_Method = Callable[..., Any]


@functools.cache
def _operations() -> Any:
    import cudatool.ops  # which is about arrays

    return cudatool.ops


@functools.cache
def _products() -> Any:
    import cudatool.blas  # at the first use of such a method

    return cudatool.blas


def _method(name: str) -> _Method:
    """Return a method that calls ``cudatool.ops.NAME`` with the array in front."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_operations(), name)(self, *args, **kwargs)

    return _named(method, name, f"See :func:`cudatool.ops.{name}`.")


def _in_place(name: str) -> _Method:
    """Return a method that does so and puts the result into the array, which it returns."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_operations(), name)(self, *args, out=self, **kwargs)

    return _named(method, f"{name}_", f"Put the result of :func:`cudatool.ops.{name}` into this array.")


def _random(name: str) -> _Method:
    """Return a method that calls ``cudatool.random.NAME`` with the array in front."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        from cudatool import random  # at the first use of such a method

        return getattr(random, name)(self, *args, **kwargs)

    return _named(method, name, f"See :func:`cudatool.random.{name}`.")


def _operator(name: str) -> _Method:
    """Return a binary operator, which leaves what is neither array nor number to the other operand."""

    def method(self: Any, other: Any) -> Any:
        return getattr(_operations(), name)(self, other) if _is_operand(other) else NotImplemented

    return method


def _reflected(name: str) -> _Method:
    def method(self: Any, other: Any) -> Any:
        return getattr(_operations(), name)(other, self) if _is_operand(other) else NotImplemented

    return method


def _is_operand(other: Any) -> bool:
    """Return whether an operation can take it.

    Raises
    ------
    UsageError
        It is a host array, which would be copied to the device on every use.
    """
    if isinstance(other, ArrayMethods) or is_number(other):
        return True
    if hasattr(other, "__array__"):
        raise UsageError(
            f"an operation on a DeviceArray and a {type(other).__name__}: copy it to the device with "
            "cudatool.asarray, or this array to the host with get()"
        )
    return False


def _named(method: _Method, name: str, doc: str) -> _Method:
    method.__name__, method.__qualname__, method.__doc__ = name, f"DeviceArray.{name}", doc
    return method


class ArrayMethods:
    """The arithmetic of :class:`~cudatool.DeviceArray`."""

    __slots__ = ()

    # NumPy's arrays and scalars leave operators between them and a DeviceArray to the latter.
    __array_ufunc__: Final = None

    __add__ = _operator("add")
    __sub__ = _operator("sub")
    __mul__ = _operator("mul")
    __truediv__ = _operator("div")
    __floordiv__ = _operator("floor_divide")
    __mod__ = _operator("remainder")
    __pow__ = _operator("pow")
    __and__ = _operator("bitwise_and")
    __or__ = _operator("bitwise_or")
    __xor__ = _operator("bitwise_xor")
    __lshift__ = _operator("bitwise_left_shift")
    __rshift__ = _operator("bitwise_right_shift")

    __radd__ = _reflected("add")
    __rsub__ = _reflected("sub")
    __rmul__ = _reflected("mul")
    __rtruediv__ = _reflected("div")
    __rfloordiv__ = _reflected("floor_divide")
    __rmod__ = _reflected("remainder")
    __rpow__ = _reflected("pow")
    __rand__ = _reflected("bitwise_and")
    __ror__ = _reflected("bitwise_or")
    __rxor__ = _reflected("bitwise_xor")
    __rlshift__ = _reflected("bitwise_left_shift")
    __rrshift__ = _reflected("bitwise_right_shift")

    __iadd__ = _in_place("add")
    __isub__ = _in_place("sub")
    __imul__ = _in_place("mul")
    __itruediv__ = _in_place("div")
    __ifloordiv__ = _in_place("floor_divide")
    __imod__ = _in_place("remainder")
    __ipow__ = _in_place("pow")
    __iand__ = _in_place("bitwise_and")
    __ior__ = _in_place("bitwise_or")
    __ixor__ = _in_place("bitwise_xor")
    __ilshift__ = _in_place("bitwise_left_shift")
    __irshift__ = _in_place("bitwise_right_shift")

    __neg__ = _method("neg")
    __abs__ = _method("abs")
    __invert__ = _method("bitwise_not")

    __eq__ = _operator("eq")
    __ne__ = _operator("ne")
    __lt__ = _operator("lt")
    __le__ = _operator("le")
    __gt__ = _operator("gt")
    __ge__ = _operator("ge")
    __hash__ = object.__hash__  # arrays are keys by identity, as in torch

    def __matmul__(self, other: Any) -> Any:
        return _products().matmul(self, other) if _is_operand(other) else NotImplemented

    def __divmod__(self: Any, other: Any) -> Any:
        return (self // other, self % other) if _is_operand(other) else NotImplemented

    def __rdivmod__(self: Any, other: Any) -> Any:
        return (other // self, other % self) if _is_operand(other) else NotImplemented

    def __pos__(self: Any) -> Any:
        return self

    def __contains__(self: Any, value: Any) -> bool:
        return bool((self == value).any()) if _is_operand(value) else False

    def __format__(self: Any, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.ndim else super().__format__(spec)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def item(self: Any) -> Any:
        """Return the only element as a Python number; waits for the current stream.

        Raises
        ------
        UsageError
            There is not just one.
        """
        if self.size != 1:
            raise UsageError(f"an array of shape {self.shape} is not one number; use all(), any() or get()")
        return self.get().reshape(()).item()

    def tolist(self: Any) -> Any:
        """Return the elements as Python numbers in nested lists, one number if there are no dimensions; waits."""
        return self.get().tolist()

    add, add_ = _method("add"), _in_place("add")
    sub, sub_ = _method("sub"), _in_place("sub")
    mul, mul_ = _method("mul"), _in_place("mul")
    div, div_ = _method("div"), _in_place("div")
    pow, pow_ = _method("pow"), _in_place("pow")
    neg, neg_ = _method("neg"), _in_place("neg")
    abs, abs_ = _method("abs"), _in_place("abs")
    exp, exp_ = _method("exp"), _in_place("exp")
    log, log_ = _method("log"), _in_place("log")
    sqrt, sqrt_ = _method("sqrt"), _in_place("sqrt")
    rsqrt, rsqrt_ = _method("rsqrt"), _in_place("rsqrt")
    reciprocal, reciprocal_ = _method("reciprocal"), _in_place("reciprocal")
    square, square_ = _method("square"), _in_place("square")
    sin, sin_ = _method("sin"), _in_place("sin")
    cos, cos_ = _method("cos"), _in_place("cos")
    tanh, tanh_ = _method("tanh"), _in_place("tanh")
    erf, erf_ = _method("erf"), _in_place("erf")
    sigmoid, sigmoid_ = _method("sigmoid"), _in_place("sigmoid")
    relu, relu_ = _method("relu"), _in_place("relu")
    clamp, clamp_ = _method("clamp"), _in_place("clamp")
    lerp, lerp_ = _method("lerp"), _in_place("lerp")
    addcmul, addcmul_ = _method("addcmul"), _in_place("addcmul")
    addcdiv, addcdiv_ = _method("addcdiv"), _in_place("addcdiv")
    masked_fill, masked_fill_ = _method("masked_fill"), _in_place("masked_fill")
    tril, tril_ = _method("tril"), _in_place("tril")
    triu, triu_ = _method("triu"), _in_place("triu")
    conj = _method("conj")
    isnan, isinf, isfinite = _method("isnan"), _method("isinf"), _method("isfinite")

    sum, mean, prod = _method("sum"), _method("mean"), _method("prod")
    max, min, amax, amin = _method("max"), _method("min"), _method("amax"), _method("amin")
    argmax, argmin = _method("argmax"), _method("argmin")
    any, all, count_nonzero = _method("any"), _method("all"), _method("count_nonzero")
    var, std, norm = _method("var"), _method("std"), _method("norm")
    softmax, log_softmax, logsumexp = _method("softmax"), _method("log_softmax"), _method("logsumexp")

    uniform_, normal_, random_ = _random("uniform_"), _random("normal_"), _random("random_")
    bernoulli, bernoulli_, multinomial = _random("bernoulli"), _random("bernoulli_"), _random("multinomial")
    exponential_, geometric_ = _random("exponential_"), _random("geometric_")
    log_normal_, cauchy_ = _random("log_normal_"), _random("cauchy_")

    def zero_(self: Any) -> Any:
        """Set every element to 0, and return the array."""
        return self.fill_(0)
