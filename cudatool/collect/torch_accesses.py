"""Infers which bytes a PyTorch operator reads and writes from its schema and its tensors' addresses, sizes and strides.

Knows nothing of PyTorch: schemas come in as :class:`Argument`, tensors as :class:`TensorView`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cudatool.trace.events import AccessFlag

__all__ = [
    "IDLE",
    "INEXACT",
    "READ",
    "UNKNOWN",
    "WRITE",
    "Argument",
    "ByteSet",
    "OperatorPlan",
    "TensorView",
    "byte_sets",
    "make_plan",
]

_MOST_RUNS = 64  # a tensor of more strided sets is recorded as its hull

READ, WRITE, INEXACT = AccessFlag.READ, AccessFlag.WRITE, AccessFlag.INEXACT


class Argument(NamedTuple):
    """An argument or a result of an operator's schema: its name, ``(a!)`` and ``(a)`` or ``(a!)``, keyword-only."""

    name: str
    is_written: bool = False
    is_aliased: bool = False
    is_keyword: bool = False


class TensorView(NamedTuple):
    """A tensor that an operator was given or returned.

    `position` is the argument's, or the result's if `is_result`; `address` is the first element's, `storage` the
    storage's; `item` is the bytes of an element, `stream` the handle of its device's current stream. If it
    `is_bound`, it has no elements but these, and perhaps not all of them.
    """

    position: int
    is_result: bool
    on_device: bool
    is_pinned: bool
    is_bound: bool
    device: int
    item: int
    address: int
    storage: int
    storage_bytes: int
    stream: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class ByteSet(NamedTuple):
    """Accessed bytes: `rows` rows of `size` bytes, `stride` bytes apart. One run has one row."""

    address: int
    size: int
    stride: int = 0
    rows: int = 1


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """What an operator does to each of its tensors.

    Attributes
    ----------
    runs
        False for operators that touch no memory: views, allocation, changes of a tensor's shape.
    is_known
        False if nothing can be said.
    is_collective
        Whether it runs on a stream of its process group's, which events inside of it tell.
    inputs, results
        Flags for each position.
    names
        Of the arguments.
    """

    runs: bool
    is_known: bool
    inputs: tuple[AccessFlag, ...]
    results: tuple[AccessFlag, ...]
    names: tuple[str, ...]
    is_collective: bool = False


UNKNOWN = OperatorPlan(True, False, (), (), ())
"""Of an operator whose schema is gone, or was never known."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators that change or make tensors without touching their elements.
_IDLE = _words(
    "empty empty_like empty_strided empty_permuted empty_quantized new_empty new_empty_strided resize_ resize_as_ set_ "
    "detach_ requires_grad_ retain_grad rename_ squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ as_strided_ "
    "_unsafe_view _reshape_alias lift lift_fresh is_pinned is_same_size is_set_to _has_same_storage_numel "
    "record_stream _nested_tensor_size sym_size sym_stride sym_numel sym_storage_offset"
)
IDLE = tuple(f"aten::{base}" for base in sorted(_IDLE - {"record_stream"}))
"""Operators of which nothing need be known: those of the above that say nothing of streams either."""
# In-place operators that do not read the old elements.
_OVERWRITE = _words(
    "copy_ zero_ fill_ uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ "
    "_foreach_zero_ _foreach_copy_ set_data"
)
# Operators whose indices or masks select parts of an argument: the schema gives an upper bound.
_PARTIAL = {
    "index_select": "self",
    "index": "self",
    "_unsafe_index": "self",
    "gather": "self",
    "take": "self",
    "masked_select": "self",
    "embedding": "weight",
    "_embedding_bag": "weight",
    "_embedding_bag_forward_only": "weight",
    "nll_loss_forward": "self weight",
    "nll_loss2d_forward": "self weight",
    "grid_sampler_2d": "input",
    "grid_sampler_3d": "input",
    **dict.fromkeys(
        _words(
            "index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ index_reduce_ scatter_ scatter_add_ "
            "scatter_reduce_ masked_fill_ masked_scatter_ put_ embedding_renorm_ tril_ triu_ fill_diagonal_"
        ),
        "self",
    ),
}
# Running statistics: written, although the schema does not say so.
_UNDECLARED = {
    name: ("running_mean", "running_var") for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}

# What collectives of c10d do with what they call `tensors`; of a broadcast and a reduction only the root's process
# knows whether it reads or writes.
_ON_TENSORS = {
    "allreduce_": READ | WRITE,
    "allreduce_coalesced_": READ | WRITE,
    "broadcast_": READ | WRITE | INEXACT,
    "reduce_": READ | WRITE | INEXACT,
    "send": READ,
    "recv_": WRITE,
    "recv_any_source_": WRITE,
}
_BARRIERS = ("barrier", "monitored_barrier_")


def make_plan(name: str, arguments: Sequence[Argument], results: Sequence[Argument]) -> OperatorPlan:
    """Return what the operator `name` (``"aten::add_.Tensor"``) does, by its schema and the tables above.

    Results that alias nothing are written, ``(a!)`` arguments read and written, ``out=`` arguments written, all others
    read. Operators of other libraries may touch less than their schema says.
    """
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    names = tuple(argument.name for argument in arguments)
    if (namespace == "aten" and base in _IDLE) or (namespace == "c10d" and base in _BARRIERS):
        return OperatorPlan(False, True, (), (), names)
    if namespace == "c10d" and base != "check_for_nan":
        return _collective(base, names, len(results))
    whole = AccessFlag(0) if namespace in ("aten", "prims") else INEXACT
    only_shape = base.endswith("_like") or base.startswith("new_")  # of the tensor to be like
    partial = _PARTIAL.get(base, "").split()
    inputs = []
    for argument in arguments:
        if argument.is_written:
            flags = WRITE if argument.is_keyword or base in _OVERWRITE else READ | WRITE
        elif argument.name in _UNDECLARED.get(base, ()):
            flags = READ | WRITE | INEXACT
        elif argument.is_aliased or only_shape:
            flags = AccessFlag(0)
        else:
            flags = READ
        if base in _OVERWRITE and argument.name == "self":
            flags = WRITE
        inputs.append(flags | (INEXACT if argument.name in partial else whole) if flags else flags)
    outputs = [AccessFlag(0) if result.is_aliased or result.is_written else WRITE | whole for result in results]
    return OperatorPlan(True, True, tuple(inputs), tuple(outputs), names)


def _collective(base: str, names: tuple[str, ...], results: int) -> OperatorPlan:
    """Return what one process does for a collective of a process group, by its arguments' names: schemas do not say."""
    by_name = {name: WRITE if name.startswith("output") else READ for name in names if name.startswith(("in", "out"))}
    by_name["tensors"] = _ON_TENSORS.get(base, AccessFlag(0))
    inputs = tuple(by_name.get(name, AccessFlag(0)) for name in names)
    return OperatorPlan(True, any(inputs), inputs, (AccessFlag(0),) * results, names, is_collective=True)


def byte_sets(tensor: TensorView) -> tuple[list[ByteSet], bool]:
    """Return the bytes of the tensor's elements, and whether these are all and only those.

    Dimensions are sorted by ascending stride, and contiguous ones are joined. A run, or rows at equal
    distances, is one set; a further dimension repeats it. If there would be too many sets, their hull replaces them.
    """
    address, item = tensor.address, tensor.item
    dimensions = []
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        if size == 0:
            return [], True
        if size > 1 and stride:  # a stride of 0 repeats the same elements
            step = stride * item
            if step < 0:
                address += step * (size - 1)
                step = -step
            dimensions.append((step, size))
    dimensions.sort()
    run = item  # bytes in a row
    rest: list[tuple[int, int]] = []
    for step, size in dimensions:
        if not rest and step <= run:  # next to each other, or overlapping
            run += step * (size - 1)
        elif rest and step == rest[-1][0] * rest[-1][1]:
            rest[-1] = rest[-1][0], rest[-1][1] * size
        else:
            rest.append((step, size))
    if not rest:
        return [ByteSet(address, run)], True
    hull = run + sum(step * (size - 1) for step, size in rest)
    (stride, rows), *outer = rest
    starts = [address]
    for step, size in outer:
        if len(starts) * size > _MOST_RUNS:
            return [ByteSet(address, hull)], False
        starts = [start + step * index for index in range(size) for start in starts]
    return [ByteSet(start, run, stride, rows) for start in starts], True
