"""Elementwise kernels: a C++ expression in, an operation on arrays of any shapes, strides and dtypes out.

One kernel for each combination of dtypes is compiled when it is first needed. The dimensions are arguments, so arrays
of every rank share it; and it loads 16 bytes at once where all arrays allow it, else element by element.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._complex import complex_functions
from cudatool.ops._layout import LOADS, THREADS, Walk, lines, own_pack, plan_struct, walk
from cudatool.runtime.allocator import Memory
from cudatool.runtime.array import ALIGNMENT, DeviceArray, check_writeable, empty, may_overlap, signature
from cudatool.runtime.calls import raise_status
from cudatool.runtime.device import call_on
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import (
    NUMBERS,
    c_type,
    can_cast,
    category,
    compute_dtype,
    is_number,
    real_dtype,
    result_type,
)
from cudatool.runtime.kernel import Kernel, compile, compile_own, launch
from cudatool.runtime.plans import LaunchPlans
from cudatool.runtime.stream import Stream, current_stream, stream_on
from cudatool.trace import hooks

__all__ = [
    "Pointwise",
    "PointwiseLaunch",
    "Result",
    "Types",
    "check_out",
    "common_device",
    "lines",
    "taken_over",
    "writable_out",
]

_EXACT: Final = 2**53  # integers below are the same as float64

_BOOL, _INT64, _FLOAT32 = np.dtype(np.bool), np.dtype(np.int64), np.dtype(np.float32)


class Result(StrEnum):
    """Which dtype an operation computes in and returns, from the common one of its operands (`result_type`)."""

    SAME = "same"
    """The common one."""
    NUMBER = "number"
    """The common one, or int64 instead of bool."""
    FLOAT = "float"
    """The common one, or float32 instead of an integer."""
    BOOL = "bool"
    """Computes in the common one, returns bool."""
    REAL = "real"
    """Computes in the common one, returns the dtype of its real part."""


class Types(NamedTuple):
    """The dtypes of one call."""

    common: np.dtype[Any]  # what the operands are cast to
    result: np.dtype[Any]


class PointwiseLaunch(NamedTuple):
    """A launch that is about to be done: operands have dtypes and shapes that fit, and do not overlap `outs` partly."""

    pointwise: Pointwise
    outs: Sequence[DeviceArray]
    operands: Sequence[Any]
    numbers: dict[str, Any]
    types: Types
    stream: Stream

    def run(self) -> tuple[Kernel, Walk]:
        """Launch the kernel."""
        return self.pointwise.enqueue(self)


class _TakenOver(threading.local):
    by: Callable[[PointwiseLaunch], tuple[Kernel, Walk] | None] | None = None


_taken_over = _TakenOver()


@contextmanager
def taken_over(by: Callable[[PointwiseLaunch], tuple[Kernel, Walk] | None]) -> Iterator[None]:
    """Let `by` do the launches of the calling thread inside, in the place of each one's ``run()``.

    It applies while there is a subscriber of events, so that it costs nothing where there is none.
    """
    before, _taken_over.by = _taken_over.by, by
    try:
        yield
    finally:
        _taken_over.by = before


class _Plan(NamedTuple):
    """A launch plan: what is the same for all operands of these shapes and types."""

    kernel: Kernel
    enqueue: Callable[..., int]  # the kernel, with no event of it
    config: Any
    rest: tuple[Any, ...]  # arguments after the operands: the numbers by keyword, and where the elements are
    casts: tuple[np.dtype[Any] | None, ...]  # what each operand is cast to if it is a number; empty: all are arrays
    compute: np.dtype[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int  # of the result, in bytes
    device: int
    signature: object  # of a new result


_PLANNED: Final = frozenset([bool, int, float, complex])  # numbers whose type says all that is to be known of them


class Pointwise:
    """An elementwise function; calling it launches its kernel.

    Parameters
    ----------
    signature
        Its name and parameters, ``"add(input, other, *, alpha=1)"``: arrays or numbers, which are broadcast, then
        numbers by keyword. An operand marked ``mask: bool`` is cast to bool and has no say in the result's dtype, nor
        has one marked ``value: input``, which is cast to it; a number marked ``rows: int = 1`` is an int64.
    expression
        C++: the result for one element, with the parameters by their names. The smaller floats come as float.
        ``index`` is the element's number, in C order.
    result
        The rule for the dtype.
    accepts
        Categories of the common dtype.
    functions
        C++ in front of the kernel.
    outputs
        Number of results, all of one dtype.
    statement
        `expression` is a statement that sets the results ``out0``, ``out1``, ... instead.
    fusible
        Whether it may be computed in one kernel with others: the C++ is ours, and does nothing but return the result.
    numbers
        Defaults of numbers that have none in the signature.
    """

    def __init__(
        self,
        signature: str,
        expression: str,
        *,
        result: Result = Result.SAME,
        accepts: Sequence[str] = ("bool", "integer", "float"),
        functions: str = "",
        outputs: int = 1,
        statement: bool = False,
        fusible: bool = True,
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        definition = ast.parse(f"def {signature}: ...").body[0]
        assert isinstance(definition, ast.FunctionDef)
        self.name = definition.name
        parameters = definition.args
        self.operands = tuple(parameter.arg for parameter in parameters.args)
        marks = {
            parameter.arg: ast.unparse(parameter.annotation) for parameter in parameters.args if parameter.annotation
        }
        self.marked = frozenset(marks)
        self.masks = frozenset(name for name, mark in marks.items() if mark == "bool")
        self.numbers = dict(numbers or {}) | {
            parameter.arg: ast.literal_eval(default)
            for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
            if default is not None
        }
        self.integers = frozenset(parameter.arg for parameter in parameters.kwonlyargs if parameter.annotation)
        self.expression = expression
        self.outputs = outputs
        self.statement = statement
        self.fusible = fusible and outputs == 1 and not statement
        self.result = result
        self.accepts = tuple(accepts)
        self.functions = functions
        self._types = functools.cache(self._find_types)
        self._kernel = functools.cache(self._compile)
        self._defaults = functools.cache(functools.partial(self._values, {}))
        self._plans = LaunchPlans[tuple[object, ...], _Plan]()

    def __call__(self, *operands: Any, out: DeviceArray | None = None, **numbers: Any) -> DeviceArray:
        """Compute on the current stream of the arrays' device.

        Parameters
        ----------
        out
            Where the result goes: the broadcast shape, and a dtype of the same or a higher category. It may be one
            of the operands.

        Raises
        ------
        UsageError
            Shapes, dtypes or devices do not fit.
        """
        if (not hooks.active or _taken_over.by is None) and (known := self._again(operands, out, numbers)) is not None:
            return known
        if numbers or len(operands) != len(self.operands):
            operands = self.bind(operands, numbers)
        arrays = [operand for operand in operands if isinstance(operand, DeviceArray)]
        device = common_device(self.name, operands)
        types = self.types(*operands)
        self.check_numbers(numbers, types.common)
        shape = self._shape(arrays)
        given, target = operands, out
        if out is None:
            out = empty(shape, types.result, device=device)
        else:
            check_out(self.name, out, shape, types.result, device)
            operands = tuple(_apart(operand, out) for operand in operands)
        done = self.launch((out,), operands, numbers, types)
        if done is not None:
            self._remember(given, target, out, numbers, types, done)
        return out

    def _again(self, operands: tuple[Any, ...], out: DeviceArray | None, numbers: dict[str, Any]) -> DeviceArray | None:
        """Compute by the launch plan for operands like these; None if there is no plan."""
        key: list[object] = [None]
        if out is not None:
            if type(out) is not DeviceArray:
                return None
            key[0] = out._signature or signature(out)
        for operand in operands:
            if type(operand) is DeviceArray:
                if out is not None and operand is not out and may_overlap(operand, out):
                    return None
                key.append(operand._signature or signature(operand))
            else:
                key.append(type(operand))
        for name in numbers:
            key += name, type(numbers[name])
        plan = self._plans.get(tuple(key))
        if plan is None:
            return None
        kernel, enqueue, config, rest, casts, compute, shape, dtype, size, device, seal = plan
        stream = stream_on(device)
        if out is None:
            memory = Memory(size, stream)
            if memory.address % ALIGNMENT:  # of an allocator that is not ours
                return None
            out = DeviceArray(np.ndarray(shape, dtype, memory), memory, device)  # type: ignore[arg-type]
            out._address, out._signature = memory.address, seal
        if casts:
            operands = tuple(
                [value if cast is None else _number(value, cast) for value, cast in zip(operands, casts, strict=True)]
            )
        if numbers:
            rest = (*self._values(numbers, compute), rest[-1])
        arguments = (out, *operands, *rest)
        if hooks.active:
            launch(stream, config, kernel, *arguments)
        elif status := call_on(device, enqueue, config.grid, config.block, config.shmem_size, stream.native, arguments):
            raise_status(status)
        return out

    def _remember(
        self,
        operands: tuple[Any, ...],
        target: DeviceArray | None,
        out: DeviceArray,
        numbers: dict[str, Any],
        types: Types,
        done: tuple[Kernel, Walk],
    ) -> None:
        """Know a call that was done, and its launch; `target` is what was given as `out`."""
        arrays = [operand for operand in operands if type(operand) is DeviceArray]
        others = [operand for operand in operands if type(operand) is not DeviceArray]
        if type(out) is not DeviceArray or not _PLANNED.issuperset(map(type, [*others, *numbers.values()])):
            return
        if target is None:
            if out.data_ptr() % ALIGNMENT:  # the next one may lie elsewhere
                return
        elif any(array is not out and may_overlap(array, out) for array in arrays):  # some were copied
            return
        compute = compute_dtype(types.common)
        casts = [
            None if type(operand) is DeviceArray else _BOOL if name in self.masks else compute
            for name, operand in zip(self.operands, operands, strict=True)
        ]
        seal = signature(out)
        key = (
            None if target is None else seal,
            *(signature(operand) if type(operand) is DeviceArray else type(operand) for operand in operands),
            *(part for name, value in numbers.items() for part in (name, type(value))),
        )
        kernel, way = done
        plan = _Plan(
            kernel,
            kernel.launcher.launch,
            way.config,
            (*self._defaults(compute), way.parameters),
            tuple(casts) if others else (),
            compute,
            out.shape,
            out.dtype,
            out.nbytes,
            out.device,
            seal,
        )
        self._plans.remember(key, plan)

    def bind(self, operands: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """Return the operands, with those that were passed by keyword taken out of `keywords`.

        Raises
        ------
        TypeError
            There are too many or too few, or a keyword is unknown.
        """
        missing = self.operands[len(operands) :]
        bound = (*operands, *(keywords.pop(name) for name in missing if name in keywords))
        unknown = keywords.keys() - self.numbers.keys()
        if len(bound) != len(self.operands) or unknown:
            parameters = ", ".join([*self.operands, *(f"{name}=" for name in self.numbers)])
            given = ", ".join([f"{len(operands)} operands", *keywords])
            raise TypeError(f"{self.name}({parameters}) was called with {given}")
        return bound

    def types(self, *operands: Any) -> Types:
        """Return the dtype that it computes in for these operands, and the result's.

        Raises
        ------
        UsageError
            It does not take them.
        """
        if self.marked:
            operands = tuple(
                operand for name, operand in zip(self.operands, operands, strict=True) if name not in self.marked
            )
        return self._types(result_type(*operands))

    def check_numbers(self, numbers: dict[str, Any], common: np.dtype[Any]) -> None:
        """Check the types of the numbers by keyword.

        Raises
        ------
        UsageError
            One is no number, or one of a higher category than what is computed in.
        """
        for name, value in numbers.items():
            wanted = _INT64 if name in self.integers else common
            if not is_number(value) or not can_cast(result_type(value), wanted):
                raise UsageError(
                    f"{self.name}: {name} must be a number that {wanted} arithmetic can take, not {value!r}"
                )

    def _values(self, numbers: dict[str, Any], compute: np.dtype[Any]) -> tuple[Any, ...]:
        """Return all numbers by keyword, of which these were given, as the kernel takes them."""
        given = {**self.numbers, **numbers}.items()
        return tuple([_number(value, _INT64 if name in self.integers else compute) for name, value in given])

    def _find_types(self, common: np.dtype[Any]) -> Types:
        if self.result is Result.FLOAT and category(common) in ("bool", "integer"):
            common = _FLOAT32
        if self.result is Result.NUMBER and common == _BOOL:
            common = _INT64
        if category(common) not in self.accepts:
            raise UsageError(f"{self.name} does not take {common}: it is for {', '.join(self.accepts)}")
        match self.result:
            case Result.BOOL:
                return Types(common, _BOOL)
            case Result.REAL:
                return Types(common, real_dtype(common))
            case _:
                return Types(common, common)

    def _shape(self, arrays: list[DeviceArray]) -> tuple[int, ...]:
        first = arrays[0].shape
        if all(array.shape == first for array in arrays):
            return first
        try:
            return np.broadcast_shapes(*(array.shape for array in arrays))
        except ValueError:
            shapes = " and ".join(str(array.shape) for array in arrays)
            raise UsageError(f"{self.name}: shapes {shapes} cannot be broadcast together") from None

    def launch(
        self,
        outs: Sequence[DeviceArray],
        operands: Sequence[Any],
        numbers: dict[str, Any],
        types: Types,
        stream: Stream | None = None,
    ) -> tuple[Kernel, Walk] | None:
        """Compute into arrays of one shape and dtype; operands are broadcast to it, and must not overlap it partly.

        Return what was launched, None if there is nothing to compute.
        """
        out = outs[0]
        if not out.size:
            return None
        call = PointwiseLaunch(self, outs, operands, numbers, types, stream or current_stream(out.device))
        if hooks.active and _taken_over.by is not None:
            return _taken_over.by(call)
        return self.enqueue(call)

    def enqueue(self, call: PointwiseLaunch) -> tuple[Kernel, Walk]:
        """Launch the kernel of a call."""
        outs, types, out = call.outs, call.types, call.outs[0]
        compute = compute_dtype(types.common)
        arrays, arguments = list(outs), []
        sources: list[np.dtype[Any] | None] = []
        for name, operand in zip(self.operands, call.operands, strict=True):
            if isinstance(operand, DeviceArray):
                array = operand if operand.shape == out.shape else operand.broadcast_to(out.shape)
                arrays.append(array)
                arguments.append(array)
                sources.append(array.dtype)
            else:
                arguments.append(_number(operand, _BOOL if name in self.masks else compute))
                sources.append(None)
        arguments += self._values(call.numbers, compute) if call.numbers else self._defaults(compute)
        way = walk(arrays, reorder=not self.asks_for_index)
        kernel = self._kernel(types, out.dtype, tuple(sources), way.width, out.device)
        launch(call.stream, way.config, kernel, *outs, *arguments, way.parameters)
        return kernel, way

    @property
    def asks_for_index(self) -> bool:
        """Whether the result depends on where the element is."""
        return "index" in self.expression

    def scalars(self, call: PointwiseLaunch) -> list[Any]:
        """Return the arguments of a call's kernel that are no arrays: operands first, then the numbers by keyword."""
        compute = compute_dtype(call.types.common)
        found = [
            _number(operand, _BOOL if name in self.masks else compute)
            for name, operand in zip(self.operands, call.operands, strict=True)
            if not isinstance(operand, DeviceArray)
        ]
        return [*found, *self._values(call.numbers, compute)]

    def _compile(
        self, types: Types, out: np.dtype[Any], sources: tuple[np.dtype[Any] | None, ...], width: int, device: int
    ) -> Kernel:
        instance = [c_type(dtype) for dtype in (out, *sources) if dtype is not None]
        with on_device(device):
            compiled = compile_own if self.fusible else compile
            return compiled(self._source(types, sources), f"{self.name}<{', '.join(instance)}, {width}>")

    def _source(self, types: Types, sources: tuple[np.dtype[Any] | None, ...]) -> str:
        arrays = [name for name, source in zip(self.operands, sources, strict=True) if source is not None]
        outs = [f"out{k}" for k in range(self.outputs)]
        place = {name: k for k, name in enumerate([*outs, *arrays])}  # in the plan
        kinds = {name: "bool" if name in self.masks else "Compute" for name in self.operands}
        kinds |= {name: "long long" if name in self.integers else "Compute" for name in self.numbers}
        parameters = [f"Out *{out}_array" for out in outs]
        for name, kind in kinds.items():
            parameters.append(f"const T_{name} *{name}_array" if name in arrays else f"{kind} {name}")
        values = []
        for name in arrays:
            common = f"convert<Common>({name}_pack.at[j])"
            value = f"convert<bool>({name}_pack.at[j])" if name in self.masks else f"convert<Compute>({common})"
            values.append(f"{kinds[name]} {name} = {value};")
        declared = f"Compute {', '.join(outs)};" if self.statement else "auto out0 ="
        return _KERNEL.format(
            numbers=NUMBERS + LOADS,
            functions=complex_functions(types.common) + self.functions,
            common=c_type(types.common),
            compute=c_type(compute_dtype(types.common)),
            result=c_type(types.result),
            plan=plan_struct(len(place)),
            threads=THREADS,
            templates="".join(f"typename T_{name}, " for name in arrays),
            name=self.name,
            parameters=", ".join(parameters),
            pack=own_pack(list(place)),
            loads=lines(
                f"Pack<T_{name}, N> {name}_pack; load({name}_pack, {name}_at, plan.strides[{k}][plan.ndim - 1], count);"
                for name, k in place.items()
                if name in arrays
            ),
            packs=", ".join(f"{out}_pack" for out in outs),
            values=lines(values, "        "),
            statement=f"{declared} {self.expression};",
            results=lines((f"{out}_pack.at[j] = convert<Out>(convert<Result>({out}));" for out in outs), "        "),
            stores=lines(f"store({out}_pack, (char *){out}_at, count);" for out in outs),
        )


_KERNEL: Final = """{numbers}
using Common = {common};  // what the operands are cast to
using Compute = {compute};  // in which it is computed
using Result = {result};

{plan}
{functions}
template <typename Out, {templates}int N>
__global__ void __launch_bounds__({threads}) {name}({parameters}, Plan plan) {{
    {pack}
    {loads}
    Pack<Out, N> {packs};
    #pragma unroll
    for (int j = 0; j < N; ++j) {{
        {values}
        [[maybe_unused]] long long index = first + j;
        {statement}
        {results}
    }}
    {stores}
}}
"""


def _number(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a number as one of this dtype, cast as the device casts: it wraps around, and overflows to infinity."""
    if dtype is _FLOAT32 and type(value) in (int, float) and -_EXACT < value < _EXACT:
        return float(value)  # which the launch rounds, as NumPy would
    try:
        with np.errstate(all="ignore"):
            return np.asarray(value).astype(dtype)[()]
    except OverflowError:
        raise UsageError(f"{value} is beyond 64 bits") from None


def common_device(name: str, operands: Sequence[Any]) -> int:
    """Return the device that the arrays are on.

    Raises
    ------
    UsageError
        There are several, or there is no array, or an operand is neither an array nor a number.
    """
    found = -1
    for operand in operands:
        if isinstance(operand, DeviceArray):
            if found not in (-1, operand.device):
                raise UsageError(f"{name}: the operands are on devices {found} and {operand.device}; copy one of them")
            found = operand.device
        elif not is_number(operand):
            raise UsageError(
                f"{name} takes DeviceArrays and numbers, not {type(operand).__name__}; copy it with cudatool.asarray"
            )
    if found == -1:
        raise UsageError(f"{name} needs at least one DeviceArray")
    return found


def check_out(name: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
    """Check that a result can go to `out`.

    Raises
    ------
    UsageError
        It cannot.
    """
    if not isinstance(out, DeviceArray) or (out.shape, out.device) != (shape, device):
        raise UsageError(f"{name}: out must be a DeviceArray of shape {shape} on device {device}; it is {out!r}")
    if not can_cast(dtype, out.dtype):
        raise UsageError(f"{name}: the result is {dtype}, which is not put into an array of {out.dtype}")
    writable_out(name, out)


def writable_out(name: str, out: DeviceArray) -> None:
    """Check that an array can be written, each element once.

    Raises
    ------
    UsageError
        It is read-only, or several of its elements are one.
    """
    check_writeable(out, f"{name}: out")
    if any(n > 1 and not stride for n, stride in zip(out.shape, out.strides, strict=True)):
        raise UsageError(f"{name}: several elements of out are one in memory; pass a clone()")


def _apart(operand: Any, out: DeviceArray) -> Any:
    """Return the operand, or a copy if it overlaps `out` and is not the same array."""
    if not isinstance(operand, DeviceArray) or not may_overlap(operand, out):
        return operand
    same = (operand.data_ptr(), operand.shape, operand.strides, operand.dtype) == (
        out.data_ptr(),
        out.shape,
        out.strides,
        out.dtype,
    )
    return operand if same else operand.clone()
