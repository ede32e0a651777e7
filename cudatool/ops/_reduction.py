"""Reductions over any dimensions: kernels that fold elements into a state, and states into each other.

The order of additions depends on the shapes alone, so results are the same on every run. Each thread folds elements
at equal distances; the threads of one output, then the blocks that share it, are merged as a binary tree.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, SupportsIndex

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._complex import complex_functions
from cudatool.ops._layout import LOADS, MOST_DIMENSIONS, THREADS, collapse, offsets, pack_width
from cudatool.ops._pointwise import check_out
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray, check_array, empty
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import NUMBERS, c_type, category, compute_dtype, require_int
from cudatool.runtime.kernel import Kernel, compile_own, launch
from cudatool.runtime.stream import current_stream

__all__ = ["Dims", "Reduction", "check_array", "dimensions", "listed"]

Dims = SupportsIndex | Iterable[SupportsIndex] | None
"""Dimensions of an array; None is all of them."""

_STATE_BYTES: Final = 32  # at most
_BLOCKS: Final = 132 * 20  # at most: all processors of an H200 are busy to the end, whether they run 4, 5 or 10 at once
_WARP: Final = 32
_LEAST: Final = 8  # packs that a thread folds, before it is worth another block

_SOURCE: Final = """{numbers}
using Compute = {compute};
using Result = {result};

template <typename T> __device__ T lowest() {{  // of all numbers
    return (T)-1 < (T)0 ? (T)((unsigned long long)1 << (8 * sizeof(T) - 1)) : (T)0;
}}
template <> __device__ bool lowest<bool>() {{ return false; }}
template <> __device__ float lowest<float>() {{ return -INFINITY; }}
template <> __device__ double lowest<double>() {{ return -INFINITY; }}
template <typename T> __device__ T highest() {{ return (T)~lowest<T>(); }}
template <> __device__ bool highest<bool>() {{ return true; }}
template <> __device__ float highest<float>() {{ return INFINITY; }}
template <> __device__ double highest<double>() {{ return INFINITY; }}

// State: starts as start(), takes elements, is merged with others, and is finished as the result.
{reducer}
static_assert(sizeof(State) <= {state_bytes});

struct Plan {{
    long long outputs, size;  // size: elements that make one output
    long long groups, packs, chunk;  // of outputs; of elements; and how many of these one block folds
    long long kept_ndim, kept_shape[{dimensions}], kept_strides[{dimensions}];
    long long ndim, shape[{dimensions}], strides[{dimensions}];
    double parameter;
}};

__device__ long long offset(long long rest, long long ndim, const long long *shape, const long long *strides) {{
    long long found = 0;
    #pragma unroll 1
    for (int d = ndim - 1; d > 0; --d) {{
        long long above = rest / shape[d];
        found += (rest - above * shape[d]) * strides[d];
        rest = above;
    }}
    return found + rest * strides[0];
}}

// Merge the states of all lanes into lane 0's; `row` is where this thread's are, `width` how many a lane has.
template <int N> __device__ void gather(State (&states)[N], State *row, int lane, int lanes, int width) {{
    #pragma unroll
    for (int j = 0; j < N; ++j) row[j] = states[j];
    #pragma unroll 1
    for (int half = lanes / 2; half; half /= 2) {{
        __syncthreads();
        if (lane >= half) continue;
        #pragma unroll
        for (int j = 0; j < N; ++j) {{
            states[j].merge(row[half * width + j]);
            row[j] = states[j];
        }}
    }}
}}

template <typename Out> __device__ void put(Out *out, State state, const Plan &plan) {{
    *out = convert<Out>(convert<Result>(state.finish(plan.size, plan.parameter)));
}}
__device__ void put(State *out, State state, const Plan &) {{ *out = state; }}

// Along the elements of an output (ALONG) the lanes are neighbours, and a pack is N of these elements; else the slots
// are neighbours, and a pack is an element of each of N outputs. If several blocks share an output (gridDim.y),
// its state for each of them is put out.
template <typename Out, typename In, int N, bool ALONG>
__global__ void __launch_bounds__({threads}) {name}(Out *out, const In *input, Plan plan) {{
    constexpr int OUTPUTS = ALONG ? 1 : N;
    __shared__ alignas(16) char memory[{threads} * OUTPUTS * sizeof(State)];
    int lane = ALONG ? threadIdx.x : threadIdx.y, slot = ALONG ? threadIdx.y : threadIdx.x;
    int lanes = ALONG ? blockDim.x : blockDim.y, slots = ALONG ? blockDim.y : blockDim.x;
    long long group = (long long)blockIdx.x * slots + slot;
    State states[N];
    #pragma unroll
    for (int j = 0; j < N; ++j) states[j] = State::start();
    if (group < plan.groups) {{
        const char *base = (const char *)input + offset(group, plan.kept_ndim, plan.kept_shape, plan.kept_strides);
        long long begin = blockIdx.y * plan.chunk;
        long long end = begin + plan.chunk < plan.packs ? begin + plan.chunk : plan.packs;
        long long first = ALONG ? 0 : group * N, all = ALONG ? plan.size : plan.outputs;
        #pragma unroll 1
        for (long long p = begin + lane; p < end; p += lanes) {{
            if (ALONG) first = p * N;
            int count = all - first < N ? all - first : N;
            Pack<In, N> pack;
            load(pack, base + offset(p, plan.ndim, plan.shape, plan.strides), sizeof(In), count);
            #pragma unroll
            for (int j = 0; j < N; ++j)
                if (j < count) states[j].take(convert<Compute>(pack.at[j]), ALONG ? first + j : p, plan.parameter);
        }}
    }}
    State found[OUTPUTS];
    #pragma unroll
    for (int j = 0; j < N; ++j)
        if (j < OUTPUTS) found[j] = states[j];
        else found[0].merge(states[j]);
    int width = slots * OUTPUTS;
    gather(found, (State *)memory + lane * width + slot * OUTPUTS, lane, lanes, width);
    #pragma unroll
    for (int j = 0; j < OUTPUTS; ++j) {{
        long long output = group * OUTPUTS + j;
        if (lane == 0 && output < plan.outputs) put(out + blockIdx.y * plan.outputs + output, found[j], plan);
    }}
}}

// The output of each block, from `count` states.
template <typename Out>
__global__ void __launch_bounds__({threads})
{name}_of_blocks(Out *out, const State *states, long long count, Plan plan) {{
    __shared__ alignas(16) char memory[{threads} * sizeof(State)];
    State found[] = {{State::start()}};
    for (long long block = threadIdx.x; block < count; block += blockDim.x)
        found[0].merge(states[block * plan.outputs + blockIdx.x]);
    gather(found, (State *)memory + threadIdx.x, threadIdx.x, blockDim.x, 1);
    if (threadIdx.x == 0) put(out + blockIdx.x, found[0], plan);
}}
"""


class Reduction:
    """A function of many elements; calling it launches its kernels.

    Parameters
    ----------
    name
        Of the kernel.
    state
        C++: what follows ``struct State``. Members: ``static State start()``, ``void take(Compute x, long long
        index, double parameter)``, ``void merge(State other)`` and ``auto finish(long long size, double parameter)``.
    accepts
        Categories of the input.
    ordered
        Whether ``index``, the element's number in C order, is used.
    """

    def __init__(self, name: str, state: str, *, accepts: Sequence[str], ordered: bool = False) -> None:
        self.name = name
        self.state = state
        self.accepts = tuple(accepts)
        self.ordered = ordered
        self._kernel = functools.cache(self._compile)

    def __call__(
        self,
        input: DeviceArray,
        dim: Dims,
        keepdim: bool,
        *,
        compute: np.dtype[Any] | None = None,
        result: np.dtype[Any] | None = None,
        out: DeviceArray | None = None,
        parameter: float = 0.0,
    ) -> DeviceArray:
        """Reduce on the current stream of the array's device.

        Parameters
        ----------
        dim
            Which dimensions are reduced.
        keepdim
            Keep them, with one element each.
        compute, result
            Dtypes of what the state takes, and of what it is finished as; default: the input's, computed in float32
            if it is smaller.

        Raises
        ------
        UsageError
            The array, `dim` or `out` do not fit.
        """
        check_array(self.name, input)
        if category(input.dtype) not in self.accepts:
            raise UsageError(f"{self.name} does not take {input.dtype}: it is for {', '.join(self.accepts)}")
        dims = dimensions(self.name, dim, input.ndim)
        result = input.dtype if result is None else result
        compute = compute_dtype(input.dtype if compute is None else compute)
        shape = tuple(1 if d in dims else n for d, n in enumerate(input.shape) if keepdim or d not in dims)
        if out is not None:
            check_out(self.name, out, shape, result, input.device)
        direct = out is not None and out.is_contiguous() and not np.may_share_memory(out.layout, input.layout)
        target = out if out is not None and direct else empty(shape, result, device=input.device)
        if target.size:
            self._launch(target, input, dims, compute, result, parameter)
        return target if out is None or direct else out.copy_(target)

    def _launch(
        self,
        out: DeviceArray,
        input: DeviceArray,
        dims: tuple[int, ...],
        compute: np.dtype[Any],
        result: np.dtype[Any],
        parameter: float,
    ) -> None:
        layout = input.layout
        plan = _plan(layout.shape, layout.strides, layout.itemsize, *offsets([input]), dims, self.ordered, parameter)
        stream = current_stream(out.device)
        kernel = functools.partial(self._kernel, types=(compute, result), device=out.device)
        target, instance = c_type(out.dtype), f"{c_type(input.dtype)}, {plan.width}, {str(plan.along).lower()}"
        if plan.blocks == 1:
            launch(stream, plan.config, kernel(f"{self.name}<{target}, {instance}>"), out, input, plan.parameters)
            return
        states = empty(plan.blocks * out.size * _STATE_BYTES, np.uint8, device=out.device)
        launch(stream, plan.config, kernel(f"{self.name}<State, {instance}>"), states, input, plan.parameters)
        config = calls.core.LaunchConfig(grid=out.size, block=min(_power_of_two(plan.blocks), THREADS))
        together = kernel(f"{self.name}_of_blocks<{target}>")
        launch(stream, config, together, out, states, plan.blocks, plan.parameters)

    def _compile(self, name: str, types: tuple[np.dtype[Any], np.dtype[Any]], device: int) -> Kernel:
        compute, result = types
        source = _SOURCE.format(
            numbers=NUMBERS + LOADS + complex_functions(compute),
            compute=c_type(compute),
            result=c_type(result),
            reducer=f"struct State {self.state};",
            state_bytes=_STATE_BYTES,
            dimensions=MOST_DIMENSIONS,
            threads=THREADS,
            name=self.name,
        )
        with on_device(device):
            return compile_own(source, name)


class _Plan(NamedTuple):
    """How an array is reduced: see the kernels' parameters; `blocks` share an output."""

    width: int
    along: bool
    blocks: int
    config: Any
    parameters: np.void


@functools.lru_cache(maxsize=4096)  # programs do the same again and again
def _plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    address: int,
    dims: tuple[int, ...],
    ordered: bool,
    parameter: float,
) -> _Plan:
    kept = [d for d in range(len(shape)) if d not in dims]
    outer = collapse([shape[d] for d in kept], [[strides[d] for d in kept]], reorder=False)
    inner = collapse([shape[d] for d in dims], [[strides[d] for d in dims]], reorder=not ordered)
    if max(len(outer), len(inner)) > MOST_DIMENSIONS:
        raise UsageError(f"an array of shape {shape} has too many dimensions; make it contiguous() first")
    outputs, size = (math.prod(row[0] for row in rows) for rows in (outer, inner))
    along = abs(inner[-1][1]) <= abs(outer[-1][1]) or outputs == 1
    packed = inner if along else outer  # whose innermost dimension is loaded in packs
    rows = [row for row in (*outer, *inner) if row is not packed[-1] and row[0] > 1]
    width = pack_width([*rows, packed[-1]], [address], [itemsize])
    packed[-1] = [-(-packed[-1][0] // width), width * packed[-1][1]]
    groups, packs = (math.prod(row[0] for row in rows) for rows in (outer, inner))

    lanes = min(_power_of_two(packs), THREADS if along else THREADS // _WARP)
    slots = min(_power_of_two(groups), THREADS // lanes) if along else _WARP
    grid = -(-groups // slots)
    blocks = max(1, min(_BLOCKS // grid, packs // (lanes * _LEAST)))
    numbers = [outputs, size, groups, packs, -(-packs // blocks), *_numbers(outer), *_numbers(inner)]
    return _Plan(
        width,
        along,
        blocks,
        calls.core.LaunchConfig(grid=(grid, blocks), block=(lanes, slots) if along else (slots, lanes)),
        np.void(struct.pack(f"<{len(numbers)}qd", *numbers, parameter)),
    )


def _numbers(rows: list[list[int]]) -> list[int]:
    padding = [0] * (MOST_DIMENSIONS - len(rows))
    return [len(rows), *(row[0] for row in rows), *padding, *(row[1] for row in rows), *padding]


def _power_of_two(count: int) -> int:
    """Return the largest power of two not above `count`, at least 1."""
    return 1 << max(count.bit_length() - 1, 0)


def listed(dim: Any) -> tuple[Any, ...] | None:
    """Return what is given as several dimensions; None if it is one, or nothing."""
    return tuple(dim) if isinstance(dim, Iterable) and not isinstance(dim, DeviceArray) else None


def dimensions(name: str, dim: Dims, ndim: int) -> tuple[int, ...]:
    """Return the dimensions that `dim` names, ascending; None and no dimension at all are all of them.

    Raises
    ------
    UsageError
        One does not exist, or is named twice.
    """
    several = listed(dim)
    parts = several if several is not None else () if dim is None else (dim,)
    given = [require_int(f"{name}: dim", part) for part in parts]
    if not given:
        return tuple(range(ndim))
    found = sorted(d + ndim if d < 0 else d for d in given)
    if ndim == 0 and found in ([0], [-1]):
        return ()
    if found[0] < 0 or found[-1] >= ndim or len(set(found)) < len(found):
        raise UsageError(f"{name}: dim={dim} does not fit an array of {ndim} dimensions")
    return tuple(found)
