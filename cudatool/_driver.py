"""Which CUDA driver this process uses: the only module that knows both NVIDIA's and ours.

The choice is made at first use, never at import, and never changes. It comes from :func:`choose` (``--device``), else
from the environment variable ``CUDATOOL_DEVICE``, else it is ``auto``:

* ``cuda``: an NVIDIA GPU.
* ``sim[:OPTIONS]``: the software device. Options are ``memory=8GiB``, ``count=2``, ``seed=7``,
  ``schedule=fifo|lifo|late|random``, ``threads=4``, ``timeout=60`` (seconds
  that a kernel may take).
* ``auto``: ``cuda`` where a GPU answers, else ``sim``.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from cudatool import config
from cudatool.code_cache import CodeCache, size_limit
from cudatool.errors import ConfigError, DeviceUnavailableError, UsageError, did_you_mean
from cudatool.loading.after_import import AfterImport
from cudatool.loading.attached import attached
from cudatool.loading.shared_libraries import loaded
from cudatool.loading.whole_imports import whole_imports
from cudatool.progress import announce
from cudatool.text import quoted
from cudatool.units import format_bytes, parse_bytes, parse_count

if TYPE_CHECKING:
    from cudatool.sim import Machine

__all__ = [
    "KINDS",
    "OPTIONS",
    "SCHEDULES",
    "Choice",
    "choose",
    "chosen",
    "device_count",
    "gpu_names",
    "gpu_processes",
    "in_fork",
    "initialize",
    "initialized",
    "last_message",
    "nvidia_address_range",
    "nvidia_devices_in_use",
    "nvidia_has_started",
    "nvidia_uuid",
    "nvml",
    "refused_address_space",
    "started",
]

KINDS = ("auto", "cuda", "sim")
OPTIONS = ("memory", "count", "seed", "schedule", "threads", "timeout")
"""Options of the software device."""
SCHEDULES = ("fifo", "lifo", "late", "random")


class Choice(NamedTuple):
    """The driver in use: ``kind`` is ``"cuda"`` or ``"sim"``, ``description`` a few words for people."""

    kind: str
    description: str
    machine: Machine | None = None
    """The software machine, None on a GPU."""


_LONGEST_TIMEOUT_S = 10**6  # of a kernel; its nanoseconds are counted in 64 bits
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_GPU_DEVICE = "/dev/nvidiactl"  # there if NVIDIA's driver is

_spec: str | None = None
_choice: Choice | None = None
_lock = threading.Lock()
_is_initialized = False  # cudatool has called cuInit
_in_fork = False  # the driver was started in the parent of this process


def _forked() -> None:
    global _lock
    machine = _choice.machine if _choice is not None else None
    # A choice alone, as `cudatool run` makes it before the program begins, does not keep the child from using CUDA.
    if _lock.locked() or (machine.initialized if machine is not None else _is_initialized):
        in_fork()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def in_fork() -> None:
    """Note in a forked child that its parent had started the driver, or that a thread of its was about to."""
    global _in_fork
    _in_fork = True


def initialized() -> None:
    """Note that this process has called cuInit: those that are forked off it cannot use CUDA from now on."""
    global _is_initialized
    _is_initialized = True


def choose(spec: str | None) -> None:
    """Set what :func:`initialize` will choose; `spec` None leaves it to the environment.

    Raises
    ------
    ConfigError
        `spec` is not a device.
    DeviceUnavailableError
        A different driver is in use already.
    """
    global _spec
    if spec is not None:
        kind, _ = _parse(spec)
        if _choice is not None and kind not in ("auto", _choice.kind):
            raise DeviceUnavailableError(f"the process uses {_choice.description} already; choose the device earlier")
        _spec = spec


def chosen() -> Choice | None:
    """Return the driver in use, None before first use."""
    return _choice


def started() -> bool:
    """Return whether a driver was chosen, and not used already by a process that this one was forked off."""
    return _choice is not None and not _in_fork


def initialize() -> Choice:
    """Load the chosen driver, once, and return the choice.

    Raises
    ------
    ConfigError
        ``CUDATOOL_DEVICE`` cannot be read.
    DeviceUnavailableError
        A GPU is asked for and there is none, or NVIDIA's driver is loaded already and ``sim`` is asked for, or the
        process was forked off one that had started a driver.
    """
    global _choice
    if _in_fork:
        raise DeviceUnavailableError(
            "the process was forked off one that had started a CUDA driver, which does not work in both; "
            "start processes by spawn: multiprocessing.set_start_method('spawn')"
        )
    if _choice is None:
        with _lock:
            if _choice is None:
                _choice = _initialize()
                _pass_device_to_children()
                if _choice.machine is not None:
                    AfterImport({"triton.backends": _serve_triton}).start()
    return _choice


def _serve_triton(_: object) -> None:
    attached("serve_triton")()


def _pass_device_to_children() -> None:
    """Let the processes that this one starts use the device that was asked for."""
    if _spec is None:
        return  # they have the environment that this one has
    os.environ[config.DEVICE.name] = _spec
    if _spec.partition(":")[0] == "sim" and os.path.exists(_GPU_DEVICE):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also those that use CUDA without cudatool


def last_message() -> str:
    """Return what the driver in use says about this thread's last failed call beyond its error code; often nothing."""
    return _choice.machine.last_message() if _choice is not None and _choice.machine is not None else ""


def device_count() -> int:
    """Return how many devices this process has, or will have, without starting a driver: it may fork afterwards.

    Raises
    ------
    ConfigError
        ``CUDATOOL_DEVICE`` cannot be read.
    DeviceUnavailableError
        The device asked for is not there.
    """
    kind, options, gpus = _wanted()
    return len(gpus) if kind == "cuda" else int(options.get("count", 1))


def gpu_names() -> list[str]:
    """Return the names of the NVIDIA GPUs that this process may use, without loading their driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        if setting is not None and setting.strip().startswith("MIG-"):  # CUDA uses one slice of a GPU at most
            handles = [pynvml.nvmlDeviceGetHandleByUUID(setting.split(",")[0].strip())]
        elif setting is not None:
            uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            handles = [handles[index] for index in _visible(setting, uuids)]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:  # as for a slice that is not there; CUDA shows none either
        return []
    finally:
        pynvml.nvmlShutdown()


def _visible(setting: str, uuids: list[str]) -> list[int]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names, by ordinal or by the beginning of their UUID.

    As the CUDA programming guide has it, the first entry that names none ends the list. A driver that finds a GPU
    named twice shows none at all.
    """
    found: list[int] = []
    for entry in map(str.strip, setting.split(",")):
        number = re.match(r"\+?\d+", entry)
        if number:
            matches = [int(number[0])] if int(number[0]) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found += matches
    return found if len(set(found)) == len(found) else []


@contextmanager
def nvml(uuid: str) -> Iterator[tuple[Any, Any]]:
    """Open NVML inside the ``with`` block; the value is :mod:`pynvml` and its handle of a GPU, or of a slice of one.

    Raises
    ------
    UsageError
        NVML refuses to say what it is asked.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml, _handle(pynvml, uuid)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise UsageError(f"NVML does not answer for GPU {uuid}: {error}") from error


def _handle(pynvml: Any, uuid: str) -> Any:
    """Return NVML's handle of a GPU or slice, whose UUID CUDA gives without saying which of the two it is."""
    if uuid.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def gpu_processes(uuid: str) -> list[tuple[int, int]]:
    """Return the id of each process that computes on an NVIDIA GPU, and its bytes of device memory, 0 if unknown.

    Raises
    ------
    UsageError
        NVML refuses to say.
    """
    with nvml(uuid) as (pynvml, handle):
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [(int(process.pid), int(process.usedGpuMemory or 0)) for process in running]


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Return kind and options of a device specification."""
    kind, _, text = spec.partition(":")
    if kind not in KINDS:
        near = did_you_mean(kind, KINDS)
        choices = near or "choose auto, cuda or sim (with options: sim:memory=8GiB,seed=7)"
        raise ConfigError(f"{quoted(spec)} is not a device; {choices}")
    options: dict[str, Any] = {}
    if not text:
        return kind, options
    if kind != "sim":
        raise ConfigError(f"{quoted(spec)}: only sim takes options")
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals or key not in OPTIONS:
            near = did_you_mean(key, OPTIONS) if equals else ""
            raise ConfigError(f"{quoted(item)} is not an option of sim; {near or 'there are ' + ', '.join(OPTIONS)}")
        if key == "schedule":
            if value not in SCHEDULES:
                near = did_you_mean(value, SCHEDULES)
                raise ConfigError(f"{quoted(value)} is not a schedule; {near or 'choose ' + ', '.join(SCHEDULES)}")
            options[key] = value
        else:
            try:
                options[key] = parse_bytes(value) if key == "memory" else parse_count(value)
            except ConfigError as error:
                raise ConfigError(f"{quoted(spec)}: {key}: {error}") from None
    if not 1 <= options.get("count", 1) <= 16 or not 1 <= options.get("threads", 1) <= 256:
        raise ConfigError(f"{quoted(spec)}: count is 1 to 16, threads 1 to 256")
    if options.get("timeout", 0) > _LONGEST_TIMEOUT_S:
        raise ConfigError(f"{quoted(spec)}: timeout is at most {_LONGEST_TIMEOUT_S} (seconds)")
    if not 2 << 20 <= options.get("memory", 2 << 20) <= 1 << 42:
        raise ConfigError(f"{quoted(spec)}: memory is 2MiB to 4TiB")
    return kind, options


def _wanted() -> tuple[str, dict[str, Any], list[str]]:
    """Return the kind of device that is asked for and is there, its options, and the names of the GPUs."""
    kind, options = _parse(_spec or config.DEVICE.value())
    gpus = gpu_names() if kind in ("auto", "cuda") else []
    if kind == "cuda" and not gpus:
        raise DeviceUnavailableError("no NVIDIA GPU answers on this machine; use --device sim for the software device")
    if gpus:
        return "cuda", options, gpus
    if _choice is None and loaded("libcuda.so.1"):
        raise DeviceUnavailableError(
            "NVIDIA's libcuda is loaded in this process already, so the software device cannot take its place; "
            "run the program with `cudatool run --device sim`, or use cudatool before what loaded it"
        )
    return kind, options, []


def _initialize() -> Choice:
    kind, options, gpus = _wanted()
    if gpus:
        return Choice("cuda", gpus[0] if len(gpus) == 1 else f"{len(gpus)} GPUs ({', '.join(dict.fromkeys(gpus))})")
    with whole_imports():
        from cudatool import sim  # a GPU needs none of it

    size_limit()  # a wrong setting is an error here, not in the middle of a launch
    schedule = sim.Schedule(options.pop("schedule", "fifo"))
    settings = sim.MachineOptions(
        schedule=schedule,
        launch_blocking=os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        code_cache=CodeCache("native"),
        **options,
    )
    with refused_address_space():
        machine = sim.load(settings)
    count = "the software device" if settings.count == 1 else f"{settings.count} software devices"
    description = f"{count} ({format_bytes(settings.memory)}, schedule {settings.schedule}, seed {settings.seed})"
    reason = ": no GPU found" if kind == "auto" else ""
    announce(f"cudatool: using {description}{reason}")
    return Choice("sim", description, machine)


@contextmanager
def refused_address_space() -> Iterator[None]:
    """Raise :class:`DeviceUnavailableError` where there are not the addresses that a software device needs."""
    from cudatool import sim  # a GPU needs none of it

    try:
        yield
    except sim.AddressSpaceError as error:
        raise DeviceUnavailableError(
            f"the software device needs {format_bytes(error.size)} of address space, more than this process may have: "
            "raise `ulimit -v`, or ask for less memory or fewer devices, as with --device sim:memory=256MiB"
        ) from None


def nvidia_has_started() -> bool:
    """Return whether cuInit was called in this process, by any caller, for NVIDIA's driver."""
    driver = loaded("libcuda.so.1")
    return driver is not None and int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


def nvidia_devices_in_use() -> list[int]:
    """Return the devices of NVIDIA's driver that have a primary context in this process; makes none."""
    driver, count = loaded("libcuda.so.1"), ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for device in range(count.value):
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        failed = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
        if not failed and is_active.value:
            found.append(device)
    return found


def nvidia_uuid(device: int) -> str | None:
    """Return the UUID of a device of NVIDIA's driver, by CUDA's number; None where the driver does not say.

    NVML numbers the GPUs of the machine, CUDA those that ``CUDA_VISIBLE_DEVICES`` shows to this process, in an order of
    its own. To both the UUID is of the same GPU, or slice of one.
    """
    from uuid import UUID  # takes a while to load, and only a GPU needs it

    driver, uuid = loaded("libcuda.so.1"), ctypes.create_string_buffer(16)
    if driver is None or driver.cuDeviceGetUuid_v2(uuid, device):
        return None
    return str(UUID(bytes=uuid.raw))


def nvidia_address_range(address: int) -> tuple[int, int] | None:
    """Return begin and size of what NVIDIA's driver gave at an address of the current context, None if nothing."""
    driver, begin, size = loaded("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_size_t()
    if driver is None:
        return None
    failed = driver.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
    return None if failed else (begin.value, size.value)
