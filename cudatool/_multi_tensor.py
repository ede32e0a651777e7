"""One kernel launch for many arrays, in the way of PyTorch's ``multi_tensor_apply``.

The arrays of a step differ in size from a handful of elements to millions. Each is cut into chunks of
:data:`CHUNK` elements, and one thread block works on one chunk. Which block has which chunk of which array, and
where the arrays lie, is a table that travels by value among the kernel's parameters, so that nothing is copied to the
device before the launch; a table is as large as parameters may be (4 KiB), and there are as many launches as tables::

    for each launch:
        Chunks table                    # of these arrays: addresses (one row per list), sizes
        table.array[b], table.chunk[b]  # what block b works on
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cudatool import _cuda
from cudatool._allocator import Layout
from cudatool._annotate import annotate
from cudatool._array import DeviceArray, asarray
from cudatool._device import device as on_device
from cudatool._kernel import Kernel, compile, launch
from cudatool._stream import current_stream
from cudatool.errors import UsageError
from cudatool.trace import hooks

__all__ = [
    "CHUNK",
    "C_TYPES",
    "PRELUDE",
    "MultiTensorKernel",
    "check_alike",
    "check_steps",
    "grouped",
    "pointer",
    "scalar_on",
]

CHUNK: Final = 65536
"""Elements that one thread block works on, at most."""
_BLOCKS: Final = 320  # of one launch, at most
_THREADS: Final = 512
_TABLE_BYTES: Final = 4096 - 88  # what is left of a kernel's parameters beside the largest options
C_TYPES: Final = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.float16): "__half",
    np.dtype(ml_dtypes.bfloat16): "__nv_bfloat16",
}
"""The dtypes that optimizers and gradient scaling know, as CUDA C++ says them."""

PRELUDE: Final = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr long long CHUNK = 65536;

template <int LISTS, int ARRAYS> struct Chunks {
    void *pointers[LISTS][ARRAYS];
    long long sizes[ARRAYS];
    int chunk[320];
    int first_block;  // how many blocks the launches before this one had
    unsigned char array[320];

    // The array of one list that the block works on, and where in it the block's chunk begins.
    template <typename T> __device__ T *array_of(int list) const { return (T *)pointers[list][array[blockIdx.x]]; }
    template <typename T> __device__ T *begin(int list) const { return array_of<T>(list) + chunk[blockIdx.x] * CHUNK; }
    __device__ long long size() const {
        long long rest = sizes[array[blockIdx.x]] - chunk[blockIdx.x] * CHUNK;
        return rest < CHUNK ? rest : CHUNK;
    }
};

// What is computed with: elements of 16 bits are computed with as float.
template <typename T> struct Compute { typedef float type; };
template <> struct Compute<double> { typedef double type; };

template <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };

template <typename T> __device__ bool aligned(const T *p) { return (unsigned long long)p % sizeof(Four<T>) == 0; }

// Four elements from i on; `whole` says that every four of the chunk are there and aligned.
template <typename T, typename C>
__device__ void load(C (&values)[4], const T *from, long long i, long long size, bool whole) {
    if (whole) {
        Four<T> four = *(const Four<T> *)(from + i);
        #pragma unroll
        for (int k = 0; k < 4; ++k) values[k] = (C)four.at[k];
    } else {
        #pragma unroll
        for (int k = 0; k < 4; ++k) values[k] = i + k < size ? (C)from[i + k] : C(0);
    }
}

template <typename T, typename C>
__device__ void store(T *to, const C (&values)[4], long long i, long long size, bool whole) {
    if (whole) {
        Four<T> four;
        #pragma unroll
        for (int k = 0; k < 4; ++k) four.at[k] = (T)values[k];
        *(Four<T> *)(to + i) = four;
    } else {
        #pragma unroll
        for (int k = 0; k < 4; ++k) if (i + k < size) to[i + k] = (T)values[k];
    }
}
"""


class _Launch(NamedTuple):
    first: int  # of the arrays in the table
    last: int  # the one behind the last
    blocks: int
    table: npt.NDArray[Any]  # without addresses


def _most_arrays(lists: int) -> int:
    """Return how many arrays fit in a table with so many lists: for each an address per list, and its size."""
    return (_TABLE_BYTES - _BLOCKS * (4 + 1) - 4) // (8 * (lists + 1))


@functools.lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...], lists: int) -> list[_Launch]:
    """Return the launches for arrays of so many elements, none of them empty."""
    most = _most_arrays(lists)
    layout = np.dtype(
        [
            ("pointers", "<u8", (lists, most)),
            ("sizes", "<i8", most),
            ("chunk", "<i4", _BLOCKS),
            ("first_block", "<i4"),
            ("array", "u1", _BLOCKS),
        ],
        align=True,
    )
    work = [(array, chunk) for array, size in enumerate(sizes) for chunk in range(-(-size // CHUNK))]
    launches: list[_Launch] = []
    start = 0
    while start < len(work):
        first = work[start][0]
        blocks = [(array, chunk) for array, chunk in work[start : start + _BLOCKS] if array - first < most]
        last = blocks[-1][0] + 1
        table = np.zeros((), layout)
        table["sizes"][: last - first] = sizes[first:last]
        table["array"][: len(blocks)] = [array - first for array, _ in blocks]
        table["chunk"][: len(blocks)] = [chunk for _, chunk in blocks]
        table["first_block"] = start
        launches.append(_Launch(first, last, len(blocks), table))
        start += len(blocks)
    return launches


class MultiTensorKernel:
    """A kernel that works on lists of arrays.

    Parameters
    ----------
    name
        Of the function template in `source`; it takes ``Chunks<lists, ARRAYS>`` and the options, both by value. ARRAYS
        is its last template parameter.
    source
        CUDA C++; :data:`PRELUDE` stands before it.
    options
        The fields of the options, a struct, as NumPy names them.
    """

    def __init__(self, name: str, source: str, options: Sequence[tuple[str, str]]) -> None:
        self.name = name
        self.source = PRELUDE + source
        self.options = np.dtype(list(options), align=True)

    def __call__(
        self,
        types: Sequence[str],
        lists: Sequence[Sequence[DeviceArray]],
        *,
        written: Collection[int],
        beside: Sequence[DeviceArray] = (),
        **options: Any,
    ) -> None:
        """Enqueue the work on the current stream of the arrays' device.

        Parameters
        ----------
        types
            The template's arguments before ARRAYS.
        lists
            The arrays. Those at the same place of each list belong together; the first list says the sizes.
        written
            Which lists the kernel writes to; it reads all.
        beside
            Arrays among the options, passed by their addresses: read and, for what traces say, written.
        options
            Value of each field of the options.
        """
        present = [index for index, array in enumerate(lists[0]) if array.size]
        if not present:
            return
        device = lists[0][0].device
        arrays = [lists_[:] if len(present) == len(lists_) else [lists_[i] for i in present] for lists_ in lists]
        kernel = _compiled(self.source, f"{self.name}<{', '.join([*types, str(_most_arrays(len(lists)))])}>", device)
        parameters = np.array(tuple(options[field] for field in self.options.names or ()), self.options)[()]
        addresses = np.array([[array.data_ptr() for array in each] for each in arrays], np.uint64)
        stream = current_stream(device)
        for first, last, blocks, template in _plan(tuple([array.size for array in arrays[0]]), len(lists)):
            table = template.copy()
            table["pointers"][:, : last - first] = addresses[:, first:last]
            config = _cuda.core.LaunchConfig(grid=blocks, block=_THREADS)
            if not hooks.active:
                launch(stream, config, kernel, table[()], parameters)
                continue
            # Addresses inside of a struct are not seen as arguments are.
            reads = [array for each in arrays for array in each[first:last]]
            writes = [array for index in written for array in arrays[index][first:last]]
            with annotate([*reads, *beside], [*writes, *beside]):
                launch(stream, config, kernel, table[()], parameters)


@functools.cache
def _compiled(source: str, name: str, device: int) -> Kernel:
    with on_device(device):
        return compile(source, name)


def pointer(scalar: DeviceArray | None) -> int:
    """Return the address of a scalar for a field of a kernel's options; 0 stands for None."""
    return 0 if scalar is None else scalar.data_ptr()


def scalar_on(device: int, scalar: DeviceArray | None, name: str) -> DeviceArray | None:
    """Return a scalar of float32 on the device that needs it: itself or, from another device, a copy.

    Raises
    ------
    UsageError
        It has more than one element, or is no float32.
    """
    if scalar is None:
        return None
    if scalar.size != 1 or scalar.dtype != np.float32:
        raise UsageError(f"{name} must be one float32 on the device, not {scalar!r}")
    return asarray(scalar, device=device)


def check_alike(lists: Mapping[str, Sequence[DeviceArray]]) -> None:
    """Check that arrays at the same place of each list have the same shape, the same order and no gaps.

    Raises
    ------
    UsageError
        They have not, or one of a dtype that :data:`C_TYPES` lacks.
    """
    (first_name, first), *others = lists.items()
    for name, arrays in others:
        if len(arrays) != len(first):
            raise UsageError(f"{name} has {len(arrays)} arrays, {first_name} {len(first)}; pass one for each")
    for name, arrays in lists.items():
        for index, (array, model) in enumerate(zip(arrays, first, strict=True)):
            layout = array.layout
            if layout.dtype not in C_TYPES:
                known = ", ".join(map(str, C_TYPES))
                raise UsageError(f"{name}[{index}] is {layout.dtype}; only {known} are possible here")
            if not layout.flags.forc and not _is_dense(layout):
                raise UsageError(f"{name}[{index}] of shape {layout.shape} has gaps; pass its contiguous()")
            if layout.shape != model.shape or array.device != model.device or _order(layout) != _order(model.layout):
                raise UsageError(
                    f"{name}[{index}] and {first_name}[{index}] must have the same shape, strides and device: "
                    f"{array!r} and {model!r}"
                )


def check_steps(steps: Sequence[DeviceArray], params: Sequence[DeviceArray]) -> None:
    """Raise UsageError unless there is one step counter for each parameter."""
    if len(steps) != len(params) or any(step.dtype != np.float32 or step.size != 1 for step in steps):
        raise UsageError("state_steps must be one float32 on the device for each of params")


def _is_dense(layout: Layout) -> bool:
    """Return whether the elements fill the memory that they lie in, in any order of dimensions."""
    expected = layout.itemsize
    for stride, count in sorted(zip(layout.strides, layout.shape, strict=True)):
        if count > 1:
            if stride != expected:
                return False
            expected *= count
    return True


def _order(layout: Layout) -> Any:
    """Return what two layouts of the same shape without gaps have in common if their elements are in the same order."""
    if layout.flags.c_contiguous:
        return None
    return [stride // layout.itemsize for stride, count in zip(layout.strides, layout.shape, strict=True) if count > 1]


def grouped(*lists: Sequence[DeviceArray]) -> list[tuple[list[DeviceArray], ...]]:
    """Return the lists cut into groups, in each of which every list is of one dtype and all are on one device."""
    groups: dict[Any, list[tuple[DeviceArray, ...]]] = {}
    for row in zip(*lists, strict=True):
        groups.setdefault((row[0].device, *[array.dtype for array in row]), []).append(row)
    return [tuple(map(list, zip(*rows, strict=True))) for rows in groups.values()]
