"""Devices: how many, what they are, which one is current."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic_ns
from types import TracebackType
from typing import Any, Final, SupportsIndex

from cudatool import _driver
from cudatool.errors import CompileError, DeviceUnavailableError, UsageError
from cudatool.runtime import calls
from cudatool.runtime.calls import check, operation
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = [
    "CUDA_KINDS",
    "DeviceLike",
    "DeviceProperties",
    "call_on",
    "can_device_access_peer",
    "core_device",
    "current_device",
    "device",
    "device_count",
    "device_index",
    "device_indices",
    "device_of",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_gencode_flags",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_current",
    "is_initialized",
    "is_tf32_supported",
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
    clock_rate: int
    """Of the multiprocessors, in kHz."""
    memory_clock_rate: int
    """In kHz."""
    memory_bus_width: int
    """In bits."""
    is_integrated: bool
    is_multi_gpu_board: bool
    uuid: str
    pci_bus_id: int
    pci_device_id: int
    pci_domain_id: int


def init() -> None:
    """Choose the device and start its driver. Everything else does so by itself when it first needs to.

    Raises
    ------
    DeviceUnavailableError
        ``CUDATOOL_DEVICE`` asks for a device that this machine does not have.
    """
    _ = calls.driver


def is_initialized() -> bool:
    """Return whether this process has chosen its device and started the driver."""
    return _driver.started()


def is_available() -> bool:
    """Return whether there is a device to use; without a GPU that is the software device.

    No driver is started to find out, so that the process may still fork.
    """
    return device_count() > 0


def device_count() -> int:
    """Return the number of devices, 0 if the one asked for is not there; starts no driver, as :func:`is_available`."""
    try:
        return _count() if _driver.started() else _driver.device_count()
    except DeviceUnavailableError:
        return 0


@functools.cache
def _count() -> int:
    return int(check(calls.driver.cuDeviceGetCount()))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.ready: set[int] = set()
        self.alone = False  # it has a current device, and there is no other


_thread = _Thread()


def current_device() -> int:
    """Return the ordinal of the calling thread's current device; every thread starts with 0."""
    return 0 if _thread.alone else _ask_current()


def is_current(index: int) -> bool:
    """Return whether a device is the calling thread's current one; costs no driver call where there is only one.

    Another library may have taken the context away since. Then the driver answers with
    CUDA_ERROR_INVALID_CONTEXT, and the same call works in ``with device(index)``: see :func:`call_on`.
    """
    return _thread.alone or _ask_current() == index


def call_on(index: int, function: Callable[..., int], *arguments: Any) -> int:
    """Call what returns a driver's status where a device is current, and return that."""
    if _thread.alone or _ask_current() == index:  # as is_current, whose call would cost more than this
        status = function(*arguments)
        if status != _INVALID_CONTEXT:
            return status
        # Another library has taken the context away from this thread.
    with device(index):
        return function(*arguments)


_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT


def _ask_current() -> int:
    status, ordinal = calls.driver.cuCtxGetDevice()
    if status == calls.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used a device yet
        set_device(0)
        ordinal = 0
    else:
        ordinal = int(check((status, ordinal)))
    _thread.alone = _count() == 1
    return ordinal


def device_index(device: DeviceLike) -> int:
    """Return the ordinal that `device` names.

    Raises
    ------
    UsageError
        `device` names none.
    DeviceUnavailableError
        There is no such device.
    """
    if type(device) is int and 0 <= device < _count():
        return device
    if device is None or (isinstance(device, str) and device == "cuda"):
        return current_device()
    try:
        text = device.removeprefix("cuda:") if isinstance(device, str) else getattr(device, "device_id", device)
        index = int(text) if isinstance(text, str) else operator.index(text)
    except (TypeError, ValueError):
        raise UsageError(f"{device!r} is not a device; pass its number, 'cuda:N' or a cuda.core.Device") from None
    if not 0 <= index < _count():
        raise DeviceUnavailableError(f"there is no device {index}; this machine has {_count()}")
    return index


def device_indices(devices: Iterable[DeviceLike]) -> list[int]:
    """Return the ordinals that `devices` name.

    Raises
    ------
    UsageError
        They are no devices, or no list of them.
    DeviceUnavailableError
        There is no such device.
    """
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise UsageError(f"devices are a list of device numbers, not {devices!r}")
    return [device_index(device) for device in devices]


def set_device(device: DeviceLike) -> None:
    """Make `device` the calling thread's current device. Prefer the :class:`device` context manager."""
    index = 0 if type(device) is int and device == 0 else device_index(device)
    with operation():
        calls.core.Device(index).set_current()


def core_device(index: int) -> Any:
    """Return the :class:`cuda.core.Device`, ready to make streams and events in the current context.

    Before the thread's first ``set_current()`` it makes none, even if another library has made a context current.
    """
    found = calls.core.Device(index)
    if index not in _thread.ready:
        current = check(calls.driver.cuCtxGetCurrent())
        found.set_current()
        check(calls.driver.cuCtxSetCurrent(current))
        _thread.ready.add(index)
    return found


class device:  # noqa: N801 - torch.cuda's name
    """Context manager that makes a device current, and afterwards the one that was; None changes nothing."""

    __slots__ = ("_previous", "idx")

    def __init__(self, device: DeviceLike) -> None:
        self.idx = -1 if device is None else device_index(device)
        self._previous: dict[int, Any] = {}  # by thread, where it has changed something: the context that was current

    def __index__(self) -> int:
        """Return the ordinal, so that the object names its device wherever one is asked for."""
        return current_device() if self.idx < 0 else self.idx

    def __enter__(self) -> None:
        if self.idx >= 0 and _ask_current() != self.idx:
            previous = check(calls.driver.cuCtxGetCurrent())
            set_device(self.idx)
            self._previous[threading.get_ident()] = previous

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous and (previous := self._previous.pop(threading.get_ident(), None)) is not None:
            check(calls.driver.cuCtxSetCurrent(previous))


class device_of(device):  # noqa: N801 - torch.cuda's name
    """Context manager that makes the device of an array current; what is on no device changes nothing.

    Parameters
    ----------
    obj
        Any array, also of another library.
    """

    __slots__ = ()

    def __init__(self, obj: Any) -> None:
        if hasattr(obj, "__dlpack_device__"):
            kind, index = obj.__dlpack_device__()
            super().__init__(index if kind in CUDA_KINDS else None)
        else:
            super().__init__(getattr(obj, "device", None) if hasattr(obj, "__cuda_array_interface__") else None)


CUDA_KINDS: Final = (2, 13)
"""DLPack's kinds of device that are a GPU's: kDLCUDA, kDLCUDAManaged."""


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of a device; the software device's begins with ``cudatool software device``."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return major and minor compute capability of a device."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return what a device is."""
    return _properties(calls.core, device_index(device))


@functools.cache  # two dozen questions to the driver take a millisecond
def _properties(core: Any, index: int) -> DeviceProperties:
    with operation():
        found = core.Device(index)
        properties = found.properties
        return DeviceProperties(
            name=found.name,
            major=properties.compute_capability_major,
            minor=properties.compute_capability_minor,
            total_memory=int(check(calls.driver.cuDeviceTotalMem(index))),
            multi_processor_count=properties.multiprocessor_count,
            warp_size=properties.warp_size,
            max_threads_per_block=properties.max_threads_per_block,
            max_threads_per_multi_processor=properties.max_threads_per_multiprocessor,
            regs_per_multiprocessor=properties.max_registers_per_multiprocessor,
            shared_memory_per_block=properties.max_shared_memory_per_block,
            shared_memory_per_block_optin=properties.max_shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=properties.max_shared_memory_per_multiprocessor,
            L2_cache_size=properties.l2_cache_size,
            clock_rate=properties.clock_rate,
            memory_clock_rate=properties.memory_clock_rate,
            memory_bus_width=properties.global_memory_bus_width,
            is_integrated=bool(properties.integrated),
            is_multi_gpu_board=bool(properties.multi_gpu_board),
            uuid=found.uuid,
            pci_bus_id=properties.pci_bus_id,
            pci_device_id=properties.pci_device_id,
            pci_domain_id=properties.pci_domain_id,
        )


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Return whether kernels on `device` can be allowed to use memory of `peer_device`; no device is its own peer."""
    index, peer = device_index(device), device_index(peer_device)
    if index == peer:
        return False
    with operation():
        return bool(calls.core.Device(index).can_access_peer(peer))


def get_arch_list() -> list[str]:
    """Return the architectures that kernels can be compiled for here, which are NVRTC's: ``["sm_75", ...]``."""
    from cuda.bindings import nvrtc

    _driver.initialize()  # before anything loads NVRTC
    status, architectures = nvrtc.nvrtcGetSupportedArchs()
    if status:
        raise CompileError(f"NVRTC does not say what it can compile for: {status.name}")
    return [f"sm_{architecture}" for architecture in architectures]


def get_gencode_flags() -> str:
    """Return the options with which nvcc compiles for all of :func:`get_arch_list`."""
    names = [architecture.removeprefix("sm_") for architecture in get_arch_list()]
    return " ".join(f"-gencode compute=compute_{name},code=sm_{name}" for name in names)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the current device computes with bfloat16: in hardware from capability 8.0 on.

    Parameters
    ----------
    including_emulation
        Count conversion to float32 and back, which every device can do.
    """
    return including_emulation or get_device_capability()[0] >= 8


def is_tf32_supported() -> bool:
    """Return whether the current device has TF32, as devices of capability 8.0 and above do."""
    return get_device_capability()[0] >= 8


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
            began = monotonic_ns() if correlation else 0
            check(calls.driver.cuCtxSynchronize())
        if correlation:
            hooks.emit(Kind.DEVICE_SYNCHRONIZE, device=index, aux1=began)


_on = device  # its name is a parameter's above
