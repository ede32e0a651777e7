"""How arrays and events are pickled for another process of this machine."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.device import get_device_properties
from cudatool.runtime.event import Event
from cudatool.runtime.ipc import IpcArray, device_of_uuid, own_memory
from cudatool.runtime.ipc_loans import Loan, borrow, lend
from cudatool.runtime.traced_calls import traced

__all__ = ["init_reductions"]

_Reduced = tuple[Any, tuple[Any, ...]]


@traced
def init_reductions() -> None:
    """Let :mod:`multiprocessing` pickle arrays and events. Importing the package has done so."""
    ForkingPickler.register(DeviceArray, _reduce_array)
    ForkingPickler.register(IpcArray, _reduce_array)
    ForkingPickler.register(Event, _reduce_event)


def _reduce_array(array: DeviceArray) -> _Reduced:
    """Lend an array's block to the process that unpickles it; waits for what this process has enqueued so far.

    Raises
    ------
    UsageError
        The memory cannot be shared.
    """
    if not array.size:
        return _empty, (array.shape, array.dtype, get_device_properties(array.device).uuid)
    memory = own_memory(array)
    start = array.data_ptr() - memory.address
    return _array, (array.shape, array.dtype, array.strides, start, lend(memory, array.device))


def _array(
    shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...], start: int, loan: Loan
) -> DeviceArray:
    memory, device = borrow(loan)
    return DeviceArray(np.ndarray(shape, dtype, np.asarray(memory).data, start, strides), memory, device)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], uuid: str) -> DeviceArray:
    return empty(shape, dtype, device=device_of_uuid(uuid))


def _reduce_event(event: Event) -> _Reduced:
    """Share an event made with ``interprocess=True``, as long as this process has it."""
    handle = event.ipc_handle()  # from now on it has a device
    return _event, (get_device_properties(event.device_index).uuid, handle)


def _event(uuid: str, handle: bytes) -> Event:
    return Event.from_ipc_handle(device_of_uuid(uuid), handle)
