"""torch.cuda.nccl's functions: a list with one array for each device of this process."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from cudatool.errors import UsageError
from cudatool.nccl._calls import DTYPES, SUM
from cudatool.nccl._communicator import Communicator, group, init_all
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.stream import Stream
from cudatool.runtime.traced_calls import traced

__all__ = ["all_gather", "all_reduce", "broadcast", "is_available", "reduce", "reduce_scatter"]

_Arrays = Sequence[DeviceArray]
_Streams = Sequence[Stream | None] | None
_Communicators = Sequence[Communicator] | None


@traced
def is_available(tensors: Iterable[DeviceArray]) -> bool:
    """Return whether the functions take these arrays: contiguous, each on a device of its own, of a dtype of NCCL."""
    devices = set()
    for array in tensors:
        if not isinstance(array, DeviceArray) or not array.is_contiguous() or array.dtype not in DTYPES:
            return False
        if array.device in devices:
            return False
        devices.add(array.device)
    return True


@traced
def all_reduce(
    inputs: _Arrays,
    outputs: _Arrays | None = None,
    op: int = SUM,
    streams: _Streams = None,
    comms: _Communicators = None,
) -> None:
    """Reduce arrays of one shape, into each of `outputs`, by default of `inputs`.

    Parameters
    ----------
    inputs, outputs
        For each device one array, contiguous and of the same dtype.
    op
        `SUM`, `PROD`, `MAX`, `MIN` or `AVG`.
    streams
        For each device its stream to enqueue on; default, also for None: the current one.
    comms
        For each array its communicator, where ranks are processes; default: one of the arrays' devices.

    Raises
    ------
    UsageError
        The lists or arrays do not fit each other; also from the other functions.
    """
    outputs = inputs if outputs is None else outputs
    with group():
        for communicator, array, out, stream in _ranks(inputs, outputs, streams, comms):
            communicator.all_reduce(array, out, op, stream=stream)


@traced
def reduce(
    inputs: _Arrays,
    output: DeviceArray | None = None,
    root: int = 0,
    op: int = SUM,
    streams: _Streams = None,
    comms: _Communicators = None,
) -> None:
    """Reduce arrays of one shape into `output` on the device of ``inputs[root]``, which is the default."""
    with group():
        for communicator, array, _, stream in _ranks(inputs, inputs, streams, comms):
            communicator.reduce(array, output if communicator.rank == root else None, root, op, stream=stream)


@traced
def broadcast(inputs: _Arrays, root: int = 0, streams: _Streams = None, comms: _Communicators = None) -> None:
    """Copy ``inputs[root]`` into all arrays, which have the same shape."""
    with group():
        for communicator, array, _, stream in _ranks(inputs, inputs, streams, comms):
            communicator.broadcast(array, root, stream=stream)


@traced
def all_gather(inputs: _Arrays, outputs: _Arrays, streams: _Streams = None, comms: _Communicators = None) -> None:
    """Copy all inputs, one after the other, into each of `outputs`, which have as many times more elements."""
    with group():
        for communicator, array, out, stream in _ranks(inputs, outputs, streams, comms):
            communicator.all_gather(array, out, stream=stream)


@traced
def reduce_scatter(
    inputs: _Arrays, outputs: _Arrays, op: int = SUM, streams: _Streams = None, comms: _Communicators = None
) -> None:
    """Reduce arrays of one shape, and write a part of the result into each of `outputs`."""
    with group():
        for communicator, array, out, stream in _ranks(inputs, outputs, streams, comms):
            communicator.reduce_scatter(array, out, op, stream=stream)


def _ranks(
    inputs: _Arrays, outputs: _Arrays, streams: _Streams, comms: _Communicators
) -> Iterator[tuple[Communicator, DeviceArray, DeviceArray, Stream | None]]:
    """Yield communicator, input, output and stream of each rank."""
    arrays: Any
    for what, arrays in (("inputs", inputs), ("outputs", outputs)):
        is_list = isinstance(arrays, Collection) and not isinstance(arrays, DeviceArray)
        if not is_list or not all(isinstance(array, DeviceArray) for array in arrays):
            raise UsageError(f"{what} should be a collection of device arrays")
    if not inputs or len(inputs) != len(outputs):
        raise UsageError(f"there must be as many outputs as inputs, and at least one: {len(outputs)}, {len(inputs)}")
    if len({(array.dtype, array.size) for array in inputs}) > 1:
        raise UsageError(f"the inputs differ in size or dtype: {list(inputs)}")
    if comms is None:
        comms = _of_devices(tuple(array.device for array in inputs))
    streams = [None] * len(inputs) if streams is None else streams
    if len(comms) != len(inputs) or len(streams) != len(inputs):
        raise UsageError(f"each of {len(inputs)} arrays needs its own stream and communicator, where they are given")
    yield from zip(comms, inputs, outputs, streams, strict=True)


@functools.cache
def _of_devices(devices: tuple[int, ...]) -> list[Communicator]:
    """Return the communicators of these devices, which are made once."""
    return init_all(devices)
