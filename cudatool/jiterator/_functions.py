"""A C++ template function as an operation on arrays."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._pointwise import Pointwise, common_device
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.dtypes import is_number, require_int
from cudatool.runtime.traced_calls import record_call, traced
from cudatool.trace import hooks

__all__ = ["JitFunction", "create_jit_fn", "create_multi_output_jit_fn"]

_CATEGORIES: Final = ("bool", "integer", "float", "complex")
_HEAD: Final = re.compile(r"template\s*<\s*typename\s+\w+\s*>\s*(?:__device__\s+)?(\w+)\s+(\w+)\s*\(([^)]*)\)")
_TEMPLATE: Final = re.compile(r"(template\s*<[^>]*>)(?!\s*__device__)")
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class JitFunction:
    """An elementwise function; made by :func:`create_jit_fn` and :func:`create_multi_output_jit_fn`.

    Calling it with arrays computes on the current stream; numbers go by keyword. The arrays are broadcast, and cast
    to their common dtype (:func:`cudatool.result_type`), which is the result's.

    Attributes
    ----------
    name
        The C++ function's.
    """

    def __init__(self, source: str, outputs: int, multiple: bool, numbers: dict[str, Any]) -> None:
        if not isinstance(source, str):
            raise UsageError(f"the source of a function is a string of C++, not {type(source).__name__}")
        heads = _HEAD.findall(_COMMENT.sub("", source))
        if not heads:
            raise UsageError("no function was found; write: template <typename T> T name(T x, T y) { return ...; }")
        returned, self.name, parameters = heads[-1]
        names = [
            re.split(r"[\s&*]+", parameter.strip())[-1] for parameter in parameters.split(",") if parameter.strip()
        ]
        taken = len(names) - (outputs if multiple else 0)
        operands = names[: taken - len(numbers)]
        if (returned == "void") != multiple:
            raise UsageError(
                f"{self.name} returns {returned}; it must be void if it has several outputs, which come last as T&"
                if multiple
                else f"{self.name} returns nothing; use create_multi_output_jit_fn for outputs passed as T&"
            )
        if taken < len(numbers) or names[len(operands) : taken] != list(numbers):
            raise UsageError(
                f"{self.name}({', '.join(names)}) must take the arrays first, then the numbers in the order of the "
                f"keywords: {', '.join(numbers) or 'none'}" + (f", then {outputs} outputs" if multiple else "")
            )
        for name, value in numbers.items():
            if not is_number(value):
                raise UsageError(f"the default of {name} must be a number, not {type(value).__name__}")
        outs = [f"out{k}" for k in range(outputs)] if multiple else []
        arguments = ", ".join([*operands, *numbers, *outs])
        signature = ", ".join([*operands, *(["*", *numbers] if numbers else [])])
        self._outputs = outputs
        self._multiple = multiple
        self._pointwise = Pointwise(
            f"jit_{self.name}({signature})",
            f"::{self.name}<Compute>({arguments})",
            accepts=_CATEGORIES,
            functions=_TEMPLATE.sub(r"\1 __device__", source),
            outputs=outputs,
            statement=multiple,
            numbers=numbers,
            fusible=False,  # C++ of the program may include, print and keep what it likes
        )

    def __call__(self, *tensors: DeviceArray, **numbers: Any) -> Any:
        """Return the result, or a tuple of the results."""
        if hooks.active:
            return record_call("cudatool.jiterator.JitFunction.__call__", self._run, tensors, numbers)
        return self._run(*tensors, **numbers)

    def _run(self, *tensors: DeviceArray, **numbers: Any) -> Any:
        if any(not isinstance(array, DeviceArray) for array in tensors):
            raise UsageError(f"{self.name} takes DeviceArrays; numbers go by keyword, and arrays through asarray")
        tensors = self._pointwise.bind(tensors, numbers)
        device = common_device(self.name, tensors)
        types = self._pointwise.types(*tensors)
        self._pointwise.check_numbers(numbers, types.common)
        try:
            shape = np.broadcast_shapes(*(array.shape for array in tensors))
        except ValueError:
            raise UsageError(f"{self.name}: shapes {[a.shape for a in tensors]} do not fit each other") from None
        outs = tuple(empty(shape, types.result, device=device) for _ in range(self._outputs))
        self._pointwise.launch(outs, tensors, numbers, types)
        return outs if self._multiple else outs[0]

    def __repr__(self) -> str:
        return f"<JitFunction {self.name}>"


@traced
def create_jit_fn(code_string: str, **kwargs: Any) -> JitFunction:
    """Return an elementwise function made from C++.

    ::

        axpy = create_jit_fn("template <typename T> T axpy(T x, T y, T a) { return a * x + y; }", a=1.0)
        axpy(x, y, a=3)

    Parameters
    ----------
    code_string
        A template of one type: the dtype in which it is computed, float for all smaller floats. Arrays come first,
        then the numbers. Of several functions the last one is meant; the others help it.
    kwargs
        The numbers, with their defaults, in the order of the parameters.

    Raises
    ------
    UsageError
        The parameters are not as they should be. What does not compile raises CompileError at the first call.
    """
    return JitFunction(code_string, 1, False, kwargs)


@traced
def create_multi_output_jit_fn(code_string: str, num_outputs: int, **kwargs: Any) -> JitFunction:
    """Return an elementwise function with several results, which are passed as ``T&`` after all else.

    Parameters
    ----------
    num_outputs
        How many there are; at most 8.
    """
    if not 1 <= require_int("num_outputs", num_outputs) <= 8:
        raise UsageError(f"num_outputs must be between 1 and 8, not {num_outputs}")
    return JitFunction(code_string, num_outputs, True, kwargs)
