"""Devices: how many, what they are, which one is current."""

from __future__ import annotations

import functools
import operator
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, SupportsIndex

from cudatool import _cuda, _driver
from cudatool._cuda import check, operation
from cudatool.errors import DeviceUnavailableError, UsageError
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = [
    "DeviceLike",
    "DeviceProperties",
    "can_device_access_peer",
    "core_device",
    "current_device",
    "device",
    "device_count",
    "device_index",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "is_available",
    "is_initialized",
    "set_device",
    "synchronize",
]

DeviceLike = SupportsIndex | str | None | Any
"""An ordinal, ``"cuda:1"``, a :class:`device`, a :class:`cuda.core.Device`; None is the current device."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a device is; names are those of ``torch.cuda.get_device_properties``. Sizes are in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int
    max_threads_per_block: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    is_integrated: bool
    uuid: str
    pci_bus_id: str


def init() -> None:
    """Choose the device and start its driver. Everything else does so by itself when it first needs to.

    Raises
    ------
    DeviceUnavailableError
        ``CUDATOOL_DEVICE`` asks for a device that this machine does not have.
    """
    _ = _cuda.driver


def is_initialized() -> bool:
    """Return whether the device has been chosen and its driver started."""
    return _driver.chosen() is not None


def is_available() -> bool:
    """Return whether there is a device to use; without a GPU that is the software device."""
    return device_count() > 0


def device_count() -> int:
    """Return the number of devices, 0 if the one asked for is not there."""
    try:
        return _count()
    except DeviceUnavailableError:
        return 0


@functools.cache
def _count() -> int:
    return int(check(_cuda.driver.cuDeviceGetCount()))


def current_device() -> int:
    """Return the ordinal of the calling thread's current device; every thread starts with 0."""
    status, ordinal = _cuda.driver.cuCtxGetDevice()
    if status == _cuda.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used a device yet
        set_device(0)
        return 0
    return int(check((status, ordinal)))


def device_index(device: DeviceLike) -> int:
    """Return the ordinal that `device` names.

    Raises
    ------
    UsageError
        `device` names none.
    DeviceUnavailableError
        There is no such device.
    """
    if device is None or device == "cuda":
        return current_device()
    try:
        text = device.removeprefix("cuda:") if isinstance(device, str) else getattr(device, "device_id", device)
        index = int(text) if isinstance(text, str) else operator.index(text)
    except (TypeError, ValueError):
        raise UsageError(f"{device!r} is not a device; pass its number, 'cuda:N' or a cuda.core.Device") from None
    if not 0 <= index < device_count():
        raise DeviceUnavailableError(f"there is no device {index}; this machine has {device_count()}")
    return index


def set_device(device: DeviceLike) -> None:
    """Make `device` the calling thread's current device. Prefer the :class:`device` context manager."""
    index = device_index(device) if device != 0 else 0
    with operation():
        _cuda.core.Device(index).set_current()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.ready: set[int] = set()


_thread = _Thread()


def core_device(index: int) -> Any:
    """Return the :class:`cuda.core.Device`, ready to make streams and events in the current context.

    Before the thread's first ``set_current()`` it makes none, even if another library has made a context current.
    """
    found = _cuda.core.Device(index)
    if index not in _thread.ready:
        current = check(_cuda.driver.cuCtxGetCurrent())
        found.set_current()
        check(_cuda.driver.cuCtxSetCurrent(current))
        _thread.ready.add(index)
    return found


class device:  # noqa: N801 - torch.cuda's name
    """Context manager that makes a device current, and afterwards the one that was; None changes nothing."""

    __slots__ = ("_previous", "idx")

    def __init__(self, device: DeviceLike) -> None:
        self.idx = -1 if device is None else device_index(device)
        self._previous: Any = None

    def __index__(self) -> int:
        """Return the ordinal, so that the object names its device wherever one is asked for."""
        return current_device() if self.idx < 0 else self.idx

    def __enter__(self) -> None:
        if self.idx >= 0 and current_device() != self.idx:
            self._previous = check(_cuda.driver.cuCtxGetCurrent())
            set_device(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            check(_cuda.driver.cuCtxSetCurrent(self._previous))
            self._previous = None


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of a device; the software device's begins with ``cudatool software device``."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return major and minor compute capability of a device."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return what a device is."""
    index = device_index(device)
    with operation():
        found = _cuda.core.Device(index)
        properties = found.properties
        return DeviceProperties(
            name=found.name,
            major=properties.compute_capability_major,
            minor=properties.compute_capability_minor,
            total_memory=int(check(_cuda.driver.cuDeviceTotalMem(index))),
            multi_processor_count=properties.multiprocessor_count,
            warp_size=properties.warp_size,
            max_threads_per_block=properties.max_threads_per_block,
            max_threads_per_multi_processor=properties.max_threads_per_multiprocessor,
            regs_per_multiprocessor=properties.max_registers_per_multiprocessor,
            shared_memory_per_block=properties.max_shared_memory_per_block,
            shared_memory_per_block_optin=properties.max_shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=properties.max_shared_memory_per_multiprocessor,
            L2_cache_size=properties.l2_cache_size,
            is_integrated=bool(properties.integrated),
            uuid=found.uuid,
            pci_bus_id=check(_cuda.driver.cuDeviceGetPCIBusId(16, index)).partition(b"\0")[0].decode(),
        )


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Return whether kernels on `device` can be allowed to use memory of `peer_device`."""
    index, peer = device_index(device), device_index(peer_device)
    with operation():
        return bool(_cuda.core.Device(index).can_access_peer(peer))


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all work on all streams of a device.

    Raises
    ------
    CudaError
        Some of that work failed.
    """
    index = device_index(device)
    with _on(index):
        with operation() as correlation:
            check(_cuda.driver.cuCtxSynchronize())
        if correlation:
            hooks.emit(Kind.DEVICE_SYNCHRONIZE, device=index)


_on = device  # its name is a parameter's above
