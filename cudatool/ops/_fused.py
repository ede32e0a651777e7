"""Several elementwise functions as one kernel: C++ that passes values between them in registers.

The numbers are those of one kernel after the other. Each result is rounded to the dtype that it would have in memory;
and what enters a function passes :func:`kept`, an instruction that no compiler sees through, so that a product in one
function and a sum in the next are not contracted to one fused multiply-add.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cudatool.ops._complex import complex_functions
from cudatool.ops._layout import LOADS, THREADS, lines, own_pack, plan_struct, walk
from cudatool.ops._pointwise import Pointwise, Types
from cudatool.ops._rows import RowCall, RowKernels
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import NUMBERS, c_type, compute_dtype
from cudatool.runtime.kernel import Kernel, compile_own, launch
from cudatool.runtime.stream import Stream

__all__ = ["Fused", "Head", "Load", "Number", "Operand", "Part", "Value"]

_LONGEST_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class Load:
    """An operand that is read from memory: which array of :attr:`Fused.loads`."""

    index: int


@dataclass(frozen=True, slots=True)
class Value:
    """An operand that an earlier part has computed."""

    part: int


@dataclass(frozen=True, slots=True)
class Number:
    """An operand that is an argument of the kernel."""


Operand = Load | Value | Number


@dataclass(frozen=True, slots=True)
class Head:
    """What a kernel that works on rows computes; the other parts are done with each element of it.

    Attributes
    ----------
    kernels, instance, width
        Of the kernel, as in :class:`~cudatool.ops._rows.RowCall`.
    dtype
        Of its result.
    """

    kernels: RowKernels
    instance: str
    width: int
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """What the kernel is called."""
        return self.instance.partition("<")[0]


@dataclass(frozen=True, slots=True)
class Part:
    """One function in a kernel of several.

    Attributes
    ----------
    dtype
        Of its result, as it is or would be in memory.
    """

    pointwise: Pointwise
    types: Types
    dtype: np.dtype[Any]
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Fused:
    """A kernel that computes several functions for each element.

    Attributes
    ----------
    parts
        In the order in which they are computed. One may be a :class:`Head`: then it is that kernel that computes them.
    loads
        Dtypes of the arrays that are read.
    stores
        The parts whose results are written, each to an array of its own.
    """

    parts: tuple[Part | Head, ...]
    loads: tuple[np.dtype[Any], ...]
    stores: tuple[int, ...]

    @property
    def head(self) -> int | None:
        """Which part is a kernel that works on rows."""
        return next((k for k, part in enumerate(self.parts) if isinstance(part, Head)), None)

    def computed(self) -> Iterator[tuple[int, Part]]:
        """Yield the elementwise parts with their numbers."""
        for k, part in enumerate(self.parts):
            if isinstance(part, Part):
                yield k, part

    @property
    def name(self) -> str:
        """What the kernel is called: ``"fused_mul_add"``."""
        names = [part.pointwise.name if isinstance(part, Part) else part.name for part in self.parts]
        found, left = "fused", len(names)
        for name in names:
            if len(found) + len(name) >= _LONGEST_NAME:
                return f"{found}_and_{left}_more"
            found, left = f"{found}_{name}", left - 1
        return found

    def launch(
        self, stores: Sequence[DeviceArray], loads: Sequence[DeviceArray], scalars: Sequence[Any], stream: Stream
    ) -> None:
        """Compute into `stores` from `loads`, arrays of one shape.

        Parameters
        ----------
        scalars
            For one part after the other, what :meth:`~cudatool.ops._pointwise.Pointwise.scalars` returns.
        """
        way = walk([*stores, *loads], reorder=not any(part.pointwise.asks_for_index for _, part in self.computed()))
        kernel = _compiled(self, way.width, stores[0].device)
        launch(stream, way.config, kernel, *stores, *loads, *scalars, 0, way.parameters)

    def launch_rows(
        self, call: RowCall, stores: Sequence[DeviceArray], loads: Sequence[DeviceArray], scalars: Sequence[Any]
    ) -> None:
        """Launch the kernel of the head, which computes all parts; `stores` are without the head's own result."""
        kernel = _compiled_rows(self, call.out.device)
        launch(call.stream, call.config, kernel, *call.arguments, *stores, *loads, *scalars, 0)

    def source(self) -> str:
        """Return the kernel's C++, a template of how many elements a thread computes."""
        names = [name for name, _ in self._arrays()]
        return _KERNEL.format(
            numbers=NUMBERS + LOADS + _KEPT,
            functions=self._functions(),
            parts="\n".join(_part(k, part) for k, part in self.computed()),
            plan=plan_struct(len(names)),
            threads=THREADS,
            name=self.name,
            parameters=", ".join(self._parameters()),
            pack=own_pack(names),
            loads=lines(
                f"Pack<{kind}, N> {name}_pack; load({name}_pack, {name}_at, plan.strides[{k}][plan.ndim - 1], count);"
                for k, (name, kind) in enumerate(self._arrays())
                if name.startswith("in")
            ),
            body=self._body(),
            stores=lines(f"store({name}_pack, (char *){name}_at, count);" for name in names if name.startswith("out")),
        )

    def source_after(self) -> str:
        """Return the C++ in front of the kernel of the head, which does the other parts with each pack of it."""
        assert self.head is not None  # there is one
        head = self.parts[self.head]
        arguments = [*(f"{name}_array" for name, _ in self._arrays()), *self._scalars(), "zero"]
        keeps = "put_pack(out, p, pack), " if self.head in self.stores else ""
        return _AFTER.format(
            kept=_KEPT,
            functions=self._functions(),
            parts="\n".join(_part(k, part) for k, part in self.computed()),
            head=c_type(head.dtype),
            parameters=", ".join([*self._parameters(), "unsigned zero"]),
            arguments=", ".join(arguments),
            keeps=keeps,
            loads=lines(
                f"const Pack<{kind}, N> {name}_pack = *(const Pack<{kind}, N> *)({name}_array + first);"
                for name, kind in self._arrays()
                if name.startswith("in")
            ),
            body=self._body(),
            stores=lines(
                f"*(Pack<{kind}, N> *)({name}_array + first) = {name}_pack;"
                for name, kind in self._arrays()
                if name.startswith("out")
            ),
        )

    def _arrays(self) -> list[tuple[str, str]]:
        """Return name and C++ type of each array that the kernel is given: results, then what is read."""
        outs = [(f"out{k}", self.parts[part].dtype) for k, part in enumerate(self.stores) if part != self.head]
        return [(name, c_type(dtype)) for name, dtype in [*outs, *((f"in{k}", d) for k, d in enumerate(self.loads))]]

    def _scalars(self) -> dict[str, str]:
        return {
            f"p{k}_{name}": kind for k, part in self.computed() for name, kind in _scalars(part, f"part{k}::").items()
        }

    def _parameters(self) -> list[str]:
        arrays = [f"{'const ' if name.startswith('in') else ''}{kind} *{name}_array" for name, kind in self._arrays()]
        return arrays + [f"{kind} {name}" for name, kind in self._scalars().items()]

    def _body(self) -> str:
        outs = [(name, kind) for name, kind in self._arrays() if name.startswith("out")]
        stored = [(k, part) for k, part in enumerate(self.stores) if part != self.head]
        of_head = (
            [] if self.head is None else [f"const {c_type(self.parts[self.head].dtype)} v{self.head} = head.at[j];"]
        )
        return _BODY.format(
            packs=lines(f"Pack<{kind}, N> {name}_pack;" for name, kind in outs),
            values=lines([*of_head, *(self._value(k, part) for k, part in self.computed())], "        "),
            results=lines((f"out{k}_pack.at[j] = v{part};" for k, part in stored), "        "),
        )

    def _functions(self) -> str:
        """Return the C++ that stands in front of all parts, each text once: it says the same for all dtypes."""
        parts = [part for _, part in self.computed()]
        texts = [complex_functions(part.types.common) for part in parts]
        texts += [part.pointwise.functions for part in parts if not _has_types(part.pointwise.functions)]
        return "".join(dict.fromkeys(texts))

    def _value(self, k: int, part: Part) -> str:
        arguments = []
        for name, operand in zip(part.pointwise.operands, part.operands, strict=True):
            match operand:
                case Number():
                    arguments.append(f"p{k}_{name}")
                    continue
                case Load(index):
                    value = f"in{index}_pack.at[j]"
                case Value(number):
                    value = f"v{number}"
            if name in part.pointwise.masks:
                arguments.append(f"convert<bool>({value})")
            else:
                arguments.append(f"kept(convert<part{k}::Compute>(convert<part{k}::Common>({value})), zero)")
        arguments += [f"p{k}_{name}" for name in part.pointwise.numbers]
        return f"const {c_type(part.dtype)} v{k} = part{k}::value({', '.join([*arguments, 'index'])});"


@functools.lru_cache(maxsize=1024)
def _compiled(fused: Fused, width: int, device: int) -> Kernel:
    with on_device(device):
        return compile_own(fused.source(), f"{fused.name}<{width}>")


@functools.lru_cache(maxsize=1024)
def _compiled_rows(fused: Fused, device: int) -> Kernel:
    head = next(part for part in fused.parts if isinstance(part, Head))
    return head.kernels.compile(head.instance, device, fused.source_after())


def _has_types(functions: str) -> bool:
    """Return whether C++ speaks of the types that differ from part to part."""
    return any(name in functions for name in ("Common", "Compute", "Result"))


def _scalars(part: Part, scope: str) -> dict[str, str]:
    """Return the C++ types of the arguments that are no arrays, by name."""
    pointwise = part.pointwise
    found = {
        name: "bool" if name in pointwise.masks else f"{scope}Compute"
        for name, operand in zip(pointwise.operands, part.operands, strict=True)
        if isinstance(operand, Number)
    }
    return found | {
        name: "long long" if name in pointwise.integers else f"{scope}Compute" for name in pointwise.numbers
    }


def _part(k: int, part: Part) -> str:
    pointwise, types = part.pointwise, part.types
    kinds = {name: "bool" if name in pointwise.masks else "Compute" for name in pointwise.operands}
    kinds |= {name: "long long" if name in pointwise.integers else "Compute" for name in pointwise.numbers}
    return _PART.format(
        k=k,
        common=c_type(types.common),
        compute=c_type(compute_dtype(types.common)),
        result=c_type(types.result),
        functions=pointwise.functions if _has_types(pointwise.functions) else "",
        out=c_type(part.dtype),
        parameters=", ".join([*(f"{kind} {name}" for name, kind in kinds.items()), "long long index"]),
        expression=pointwise.expression,
    )


_PART: Final = """
namespace part{k} {{
using Common = {common};  // what the operands are cast to
using Compute = {compute};  // in which it is computed
using Result = {result};
{functions}
__device__ __forceinline__ {out} value({parameters}) {{
    auto out0 = {expression};
    return convert<{out}>(convert<Result>(out0));
}}
}}"""

_KEPT: Final = """
// The same number. Compilers do not know that `zero` is 0, so they cannot combine what made it with what uses it.
template <typename T> __device__ T kept(T x, unsigned) { return x; }
__device__ float kept(float x, unsigned zero) {
    unsigned bits;
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(bits) : "r"(__float_as_uint(x)), "r"(zero));
    return __uint_as_float(bits);
}
__device__ double kept(double x, unsigned zero) {
    long long bits;
    asm volatile("xor.b64 %0, %1, %2;" : "=l"(bits) : "l"(__double_as_longlong(x)), "l"((long long)zero));
    return __longlong_as_double(bits);
}
template <typename T> __device__ complex<T> kept(complex<T> z, unsigned zero) {
    return {kept(z.re, zero), kept(z.im, zero)};
}
"""

_BODY: Final = """
    {packs}
    #pragma unroll
    for (int j = 0; j < N; ++j) {{
        [[maybe_unused]] long long index = first + j;
        {values}
        {results}
    }}"""

_KERNEL: Final = """{numbers}
{plan}
{functions}
{parts}
template <int N>
__global__ void __launch_bounds__({threads}) {name}({parameters}, unsigned zero, Plan plan) {{
    {pack}
    {loads}
    {body}
    {stores}
}}
"""

_AFTER: Final = """{kept}
{functions}
{parts}
// What is done with a pack of the result of a kernel that works on rows, whose first element has this number.
template <int N> __device__ __forceinline__ void after(
    const Pack<{head}, N> &head, long long first, {parameters}
) {{
    {loads}
    {body}
    {stores}
}}
#define AFTER_PARAMETERS , {parameters}
#define AFTER_ARGUMENTS , {arguments}
#define PUT(out, p, pack) ({keeps}after<N>(pack, row * columns + (p) * N, {arguments}))
"""
