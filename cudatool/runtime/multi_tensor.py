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

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.runtime import calls
from cudatool.runtime.allocator import Layout
from cudatool.runtime.annotate import annotate
from cudatool.runtime.array import DeviceArray, asarray, empty, list_of_arrays
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import NUMBERS, bfloat16
from cudatool.runtime.kernel import Kernel, compile_own, is_watched, launch
from cudatool.runtime.stream import current_stream
from cudatool.trace import hooks

__all__ = [
    "CHUNK",
    "FLOATS",
    "PRELUDE",
    "Arrays",
    "TableLaunch",
    "MultiTensorKernel",
    "check_alike",
    "check_steps",
    "empty_alike",
    "grouped",
    "is_dense",
    "most_arrays",
    "plan",
    "pointer",
    "scalar_on",
]

CHUNK: Final = 65536
"""Elements that one thread block works on, at most."""
_BLOCKS: Final = 320  # of one launch, at most
_THREADS: Final = 512
_FLOAT32: Final = np.dtype(np.float32)
_TABLE_BYTES: Final = 4096 - 88  # what is left of a kernel's parameters beside the largest options
FLOATS: Final = tuple(map(np.dtype, (np.float32, np.float64, np.float16, bfloat16)))
"""The dtypes that optimizers and gradient scaling know."""

PRELUDE: Final = (
    NUMBERS
    + """
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
)


class Arrays(tuple[DeviceArray, ...]):
    """A list of arrays, and what launches need to know of them, which is computed once."""

    @functools.cached_property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Address of each."""
        return np.array([array.data_ptr() for array in self], np.uint64)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple([array.layout.size for array in self])

    @functools.cached_property
    def kinds(self) -> dict[tuple[int, np.dtype[Any]], None]:
        """Every device and dtype that one of them has, in the order in which they come first."""
        return dict.fromkeys([(array.device, array.layout.dtype) for array in self])

    @functools.cached_property
    def forms(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape of each, and in which order its elements lie: None is C order, ``()`` says that there are gaps."""
        return [
            (array.layout.shape, None if array.layout.flags.c_contiguous else _order(array.layout)) for array in self
        ]


def _order(layout: Layout) -> tuple[int, ...]:
    """Return what all layouts of one shape that fill their memory in the same order have in common, ``()`` for gaps."""
    if not is_dense(layout):
        return ()
    return tuple(step // layout.itemsize for step, count in zip(layout.strides, layout.shape, strict=True) if count > 1)


class TableLaunch(NamedTuple):
    """One launch: which arrays its table has, and how many blocks."""

    first: int  # of the arrays in the table
    last: int  # the first one after them
    blocks: int
    table: npt.NDArray[Any]  # without addresses


def most_arrays(lists: int) -> int:
    """Return how many arrays fit in a table with so many lists: for each an address per list, and its size."""
    return (_TABLE_BYTES - _BLOCKS * (4 + 1) - 4) // (8 * (lists + 1))


@functools.lru_cache(maxsize=256)
def plan(sizes: tuple[int, ...], lists: int) -> list[TableLaunch]:
    """Return the launches for arrays of so many elements, none of them empty."""
    most = most_arrays(lists)
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
    launches: list[TableLaunch] = []
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
        launches.append(TableLaunch(first, last, len(blocks), table))
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
        arrays = [each if isinstance(each, Arrays) else Arrays(each) for each in lists]
        if 0 in arrays[0].sizes:
            present = [index for index, size in enumerate(arrays[0].sizes) if size]
            arrays = [Arrays(each[index] for index in present) for each in arrays]
        if not arrays[0]:
            return
        device = arrays[0][0].device
        kernel = _compiled(self.source, f"{self.name}<{', '.join([*types, str(most_arrays(len(arrays)))])}>", device)
        parameters = np.array(tuple(options[field] for field in self.options.names or ()), self.options)[()]
        stream = current_stream(device)
        for first, last, blocks, template in plan(arrays[0].sizes, len(arrays)):
            table = template.copy()
            for row, each in zip(table["pointers"], arrays, strict=True):
                row[: last - first] = each.addresses[first:last]
            config = calls.core.LaunchConfig(grid=blocks, block=_THREADS)
            if hooks.measures_accesses or not (hooks.wants_accesses or is_watched()):
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
        return compile_own(source, name)


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
    if not isinstance(scalar, DeviceArray) or scalar.size != 1 or scalar.dtype != np.float32:
        raise UsageError(f"{name} must be one float32 on the device, not {scalar!r}")
    return asarray(scalar, device=device)


def check_alike(lists: Mapping[str, Sequence[DeviceArray]]) -> list[Arrays]:
    """Return the lists, if arrays at the same place of each have the same shape, the same order and no gaps.

    Raises
    ------
    UsageError
        They have not, or one is of a dtype that :data:`FLOATS` lacks.
    """
    checked = [
        arrays if isinstance(arrays, Arrays) else Arrays(list_of_arrays(name, arrays)) for name, arrays in lists.items()
    ]
    model, model_name = checked[0], next(iter(lists))
    for name, arrays in zip(lists, checked, strict=True):
        if len(arrays) != len(model):
            raise UsageError(f"{name} has {len(arrays)} arrays, {model_name} {len(model)}; pass one for each")
        for _, dtype in arrays.kinds:
            if dtype not in FLOATS:
                raise UsageError(f"{name} has {dtype}; only {', '.join(map(str, FLOATS))} are possible here")
        for index, (shape, order) in enumerate(arrays.forms):
            if order == ():
                raise UsageError(f"{name}[{index}] of shape {shape} has gaps; pass its contiguous()")
        one_device = len({device for each in (arrays, model) for device, _ in each.kinds}) <= 1
        if arrays.forms == model.forms and one_device:
            continue
        for index, (array, other) in enumerate(zip(arrays, model, strict=True)):
            if arrays.forms[index] != model.forms[index] or array.device != other.device:
                raise UsageError(
                    f"{name}[{index}] and {model_name}[{index}] must have the same shape, order of elements and "
                    f"device: {array!r} with strides {array.strides}, {other!r} with {other.strides}"
                )
    return checked


def check_steps(steps: Sequence[DeviceArray], params: Sequence[DeviceArray]) -> Arrays:
    """Return the step counters, one for each parameter.

    Raises
    ------
    UsageError
        There are more or less, or they are not one float32 each.
    """
    checked = steps if isinstance(steps, Arrays) else Arrays(steps)
    fit = len(checked) == len(params) and all(s.device == p.device for s, p in zip(checked, params, strict=True))
    if not fit or {*checked.sizes} - {1} or {dtype for _, dtype in checked.kinds} - {_FLOAT32}:
        raise UsageError("state_steps must be one float32 for each of params, on its device")
    return checked


def is_dense(layout: Layout) -> bool:
    """Return whether the elements fill the memory that they lie in, in any order of dimensions."""
    expected = layout.itemsize
    for stride, count in sorted(zip(layout.strides, layout.shape, strict=True)):
        if count > 1:
            if stride != expected:
                return False
            expected *= count
    return True


def empty_alike(array: DeviceArray, dtype: npt.DTypeLike) -> DeviceArray:
    """Return a new array on the same device, of the same shape and with the dimensions in the same order in memory."""
    if array.is_contiguous():
        return empty(array.shape, dtype, device=array.device)
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])  # the outermost dimension first
    made = empty([array.shape[axis] for axis in order], dtype, device=array.device)
    return made.transpose(*[order.index(axis) for axis in range(array.ndim)])


def grouped(lists: Sequence[Arrays]) -> list[Sequence[Arrays]]:
    """Return the lists cut into groups, in each of which every list is of one dtype and all are on one device."""
    if all(len(arrays.kinds) == 1 for arrays in lists):  # checked before: corresponding arrays are on one device
        return [lists]
    groups: dict[Any, list[tuple[DeviceArray, ...]]] = {}
    for row in zip(*lists, strict=True):
        groups.setdefault((row[0].device, *[array.dtype for array in row]), []).append(row)
    return [list(map(Arrays, zip(*rows, strict=True))) for rows in groups.values()]
