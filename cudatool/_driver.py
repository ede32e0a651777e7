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
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudatool.config import cache_directory
from cudatool.errors import ConfigError, DeviceUnavailableError, UsageError
from cudatool.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from cudatool.sim import Machine, Options

__all__ = ["Choice", "choose", "chosen", "gpu_names", "gpu_processes", "initialize", "last_message"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The driver in use: ``kind`` is ``"cuda"`` or ``"sim"``, ``description`` a few words for people."""

    kind: str
    description: str
    machine: Machine | None = None
    """The software machine, None on a GPU."""


_spec: str | None = None
_choice: Choice | None = None
_lock = threading.Lock()


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


def initialize() -> Choice:
    """Load the chosen driver, once, and return the choice.

    Raises
    ------
    ConfigError
        ``CUDATOOL_DEVICE`` cannot be read.
    DeviceUnavailableError
        A GPU is asked for and there is none, or NVIDIA's driver is loaded already and ``sim`` is asked for.
    """
    global _choice
    if _choice is None:
        with _lock:
            if _choice is None:
                _choice = _initialize()
    return _choice


def last_message() -> str:
    """Return what the driver in use says about this thread's last failed call beyond its error code; often nothing."""
    if _choice is None or _choice.machine is None:
        return ""
    from cudatool import sim

    return sim.last_message()


def gpu_names() -> list[str]:
    """Return the names of the NVIDIA GPUs that this process may use, without loading their driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        count = pynvml.nvmlDeviceGetCount()
        return [str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()


def gpu_processes(uuid: str) -> list[tuple[int, int]]:
    """Return the id of each process that computes on an NVIDIA GPU, and its bytes of device memory, 0 if unknown.

    Raises
    ------
    UsageError
        NVML refuses to say.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise UsageError(f"NVML does not list the processes of GPU {uuid}: {error}") from error
    return [(int(process.pid), int(process.usedGpuMemory or 0)) for process in running]


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Return kind and options of a device specification."""
    kind, _, text = spec.partition(":")
    if kind not in ("auto", "cuda", "sim"):
        raise ConfigError(f"{spec!r} is not a device; choose auto, cuda or sim (with options: sim:memory=8GiB,seed=7)")
    options: dict[str, Any] = {}
    if not text:
        return kind, options
    if kind != "sim":
        raise ConfigError(f"{spec!r}: only sim takes options")
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals or key not in ("memory", "count", "seed", "schedule", "threads", "timeout"):
            raise ConfigError(
                f"{item!r} is not an option of sim; there are memory, count, seed, schedule, threads and timeout"
            )
        if key == "memory":
            options[key] = parse_bytes(value)
        elif key == "schedule":
            if value not in ("fifo", "lifo", "late", "random"):
                raise ConfigError(f"{value!r} is not a schedule; choose fifo, lifo, late or random")
            options[key] = value
        elif not value.isdecimal():
            raise ConfigError(f"{item!r}: {key} is a whole number")
        else:
            options[key] = int(value)
    if not 1 <= options.get("count", 1) <= 16 or not 1 <= options.get("threads", 1) <= 256:
        raise ConfigError(f"{spec!r}: count is 1 to 16, threads 1 to 256")
    if not 2 << 20 <= options.get("memory", 2 << 20) <= 1 << 42:
        raise ConfigError(f"{spec!r}: memory is 2MiB to 4TiB")
    return kind, options


def _initialize() -> Choice:
    spec = _spec or os.environ.get("CUDATOOL_DEVICE") or "auto"
    kind, options = _parse(spec)
    gpus = gpu_names() if kind in ("auto", "cuda") else []
    if kind == "cuda" and not gpus:
        raise DeviceUnavailableError("no NVIDIA GPU answers on this machine; use --device sim for the software device")
    if gpus:
        return Choice("cuda", gpus[0] if len(gpus) == 1 else f"{len(gpus)} GPUs ({', '.join(dict.fromkeys(gpus))})")
    if _is_loaded("libcuda.so.1"):
        raise DeviceUnavailableError(
            "NVIDIA's libcuda is loaded in this process already, so the software device cannot take its place; "
            "run the program with `cudatool run --device sim`, or use cudatool before what loaded it"
        )
    from cudatool.sim import Options, Schedule, load

    schedule = Schedule(options.pop("schedule", "fifo"))
    settings: Options = Options(schedule=schedule, cache_dir=cache_directory() / "native", **options)
    machine = load(settings)
    count = "the software device" if settings.count == 1 else f"{settings.count} software devices"
    description = f"{count} ({format_bytes(settings.memory)}, schedule {settings.schedule}, seed {settings.seed})"
    reason = ", because no NVIDIA GPU answers" if kind == "auto" else ""
    sys.stderr.write(f"cudatool: using {description}{reason}\n")
    return Choice("sim", description, machine)


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
