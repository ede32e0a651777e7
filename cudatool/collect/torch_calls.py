"""Derives what one PyTorch operator does on the device and on the host from its plan and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from cudatool.collect.torch_accesses import ByteSet, OperatorPlan, TensorView, byte_sets
from cudatool.trace.events import AccessFlag, CopyFlag

__all__ = ["OnHost", "OperatorCall", "TensorAccess", "make_call", "merged"]

_BETWEEN_DEVICES = CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE
_COPIES = ("aten::copy_", "aten::_to_copy")

TensorAccess = tuple[int, int, int, int, int, str]
"""Address, size, flags, distance between rows, number of rows, argument: what an ACCESS record holds."""

OnHost = tuple[ByteSet, AccessFlag]


@dataclass(slots=True)
class OperatorCall:
    """What a call of an operator does.

    Attributes
    ----------
    name
        Of the operator; in a backward graph also of its node.
    device, stream
        Where it runs: ordinal and handle.
    runs
        Whether it is an operation of the device.
    is_known
        Whether `accesses` is complete.
    accesses
        What it touches as an operation of the device.
    on_host
        The host's own accesses to pinned memory.
    made
        New pinned memory: address, size.
    copy
        Of a copy between memories: flags, destination, source, bytes.
    goes_on
        Whether it may write device memory after it has synchronized the stream, if it synchronizes.
    is_collective
        Whether it runs on another stream, which events inside of it tell.
    used_on
        Of record_stream: the storage, and the handle of the stream.
    """

    name: str
    device: int = 0
    stream: int = 0
    runs: bool = False
    is_known: bool = True
    accesses: list[TensorAccess] = field(default_factory=list)
    on_host: list[OnHost] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    copy: tuple[CopyFlag, int, int, int] | None = None
    goes_on: bool = False
    is_collective: bool = False
    used_on: tuple[int, int] | None = None

    @property
    def is_between_devices(self) -> bool:
        """Whether it copies from one device to another."""
        return self.copy is not None and self.copy[0] & _BETWEEN_DEVICES == _BETWEEN_DEVICES


def make_call(operator: str, node: str, plan: OperatorPlan, tensors: Sequence[TensorView], extra: int) -> OperatorCall:
    """Return what a call of `operator` does to `tensors`, its arguments and then its results.

    `node` is the node of the backward graph that it is part of, if any; `extra` record_stream's stream.
    """
    call = OperatorCall(f"{operator} ({node.rpartition('::')[2]})" if node else operator, is_known=plan.is_known)
    on_device = [tensor for tensor in tensors if tensor.on_device]
    given = {(tensor.storage, tensor.address) for tensor in tensors if not tensor.is_result}
    for tensor in tensors:
        if tensor.is_pinned and tensor.is_result and (tensor.storage, tensor.address) not in given:
            call.made.append((tensor.storage, tensor.storage_bytes))
    if on_device:
        call.device, call.stream = on_device[0].device, on_device[0].stream
        if operator == "aten::record_stream":
            call.used_on = on_device[0].storage, extra
    if not plan.runs:
        return call
    call.is_collective = plan.is_collective
    if not plan.is_known:
        call.runs = bool(on_device)
        return call
    copies = operator.partition(".")[0] in _COPIES
    for tensor in tensors:
        flags = _flags(plan, tensor, given)
        if not flags:
            continue
        sets, exact = byte_sets(tensor)
        if not exact or tensor.is_bound:
            flags |= AccessFlag.INEXACT
        if on_device and (tensor.on_device or copies):
            argument = "" if tensor.is_result else plan.names[tensor.position]
            call.accesses += [_access(found, flags, argument) for found in sets]
        elif tensor.is_pinned:
            call.on_host += [(found, flags) for found in sets]
        if tensor.on_device and flags & AccessFlag.WRITE and not copies:
            call.goes_on = True
    call.runs = bool(call.accesses)
    if copies:
        _make_copy(call, tensors)
    return call


def merged(accesses: Iterable[TensorAccess]) -> list[TensorAccess]:
    """Return the same bytes and flags in fewer accesses: adjacent runs are joined, and duplicates are dropped."""
    runs, strided = set(), set()
    for address, size, flags, stride, rows, _ in accesses:
        if stride:
            strided.add((address, size, flags, stride, rows, ""))
        else:
            runs.add((flags, address, address + size))
    result = list(strided)
    for flags, group in groupby(sorted(runs), key=lambda run: run[0]):
        start = stop = -1
        for _, low, high in group:
            if low > stop:
                if stop > start:
                    result.append((start, stop - start, flags, 0, 0, ""))
                start = low
            stop = max(stop, high)
        result.append((start, stop - start, flags, 0, 0, ""))
    return result


def _access(found: ByteSet, flags: AccessFlag, argument: str) -> TensorAccess:
    return found.address, found.size, int(flags), found.stride, found.rows if found.stride else 0, argument


def _flags(plan: OperatorPlan, tensor: TensorView, given: set[tuple[int, int]]) -> AccessFlag:
    """Return what the operator does to the tensor; a result that is also an argument is not a new tensor."""
    if not tensor.is_result:
        return plan.inputs[tensor.position]
    if not plan.results or (tensor.storage, tensor.address) in given:
        return AccessFlag(0)
    return plan.results[min(tensor.position, len(plan.results) - 1)]


def _make_copy(call: OperatorCall, tensors: Sequence[TensorView]) -> None:
    """Describe the two memories of a copy. A copy within one device is an ordinary kernel."""
    given = [tensor for tensor in tensors if not tensor.is_result]
    # aten::copy_(self, src), aten::_to_copy(self) -> result
    pair = given[:2] if len(given) > 1 else [tensor for tensor in tensors if tensor.is_result][:1] + given
    if len(pair) != 2 or not (pair[0].on_device or pair[1].on_device):
        return
    to, source = pair
    if to.on_device and source.on_device and to.device == source.device:
        return
    flags = CopyFlag.ASYNC  # if the host waits, the log has the synchronization
    if to.on_device:
        flags |= CopyFlag.DESTINATION_DEVICE
    elif not to.is_pinned:
        flags |= CopyFlag.DESTINATION_PAGEABLE
    if source.on_device:
        flags |= CopyFlag.SOURCE_DEVICE
        call.device, call.stream = source.device, source.stream
    elif not source.is_pinned:
        flags |= CopyFlag.SOURCE_PAGEABLE
    size = to.item
    for length in to.sizes:
        size *= length
    call.copy = flags, to.address, source.address, size
