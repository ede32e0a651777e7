"""What a GPU's sensors say, through NVIDIA's management library; the software device has memory alone."""

from __future__ import annotations

from typing import Any, Final

from cudatool import _driver
from cudatool.errors import UsageError
from cudatool.runtime.allocator import mem_get_info
from cudatool.runtime.device import DeviceLike, device_index, get_device_properties

__all__ = [
    "clock_rate",
    "device_memory_used",
    "memory_usage",
    "power_draw",
    "temperature",
    "utilization",
]

_DIE: Final = 0  # NVML_TEMPERATURE_GPU
_MULTIPROCESSORS: Final = 1  # NVML_CLOCK_SM


def device_memory_used(device: DeviceLike = None) -> int:
    """Return the bytes of a device's memory that are in use, by all processes."""
    index = device_index(device)
    if _driver.initialize().kind == "sim":
        free, total = mem_get_info(index)
        return total - free
    return int(_ask(index, "memory", "nvmlDeviceGetMemoryInfo").used)


def memory_usage(device: DeviceLike = None) -> int:
    """Return in how many percent of the latest sample period memory was read or written.

    A period is between 1/6 s and 1 s long.

    Raises
    ------
    UsageError
        NVML does not know, or it is the software device. So for all functions of this kind.
    """
    return int(_ask(device_index(device), "use of memory over time", "nvmlDeviceGetUtilizationRates").memory)


def utilization(device: DeviceLike = None) -> int:
    """Return in how many percent of the latest sample period a kernel ran."""
    return int(_ask(device_index(device), "utilization", "nvmlDeviceGetUtilizationRates").gpu)


def temperature(device: DeviceLike = None) -> int:
    """Return the temperature of the GPU in degrees Celsius."""
    return int(_ask(device_index(device), "temperature", "nvmlDeviceGetTemperature", _DIE))


def power_draw(device: DeviceLike = None) -> int:
    """Return the power that a device draws, in mW: of late on average, or now, as the GPU has it."""
    return int(_ask(device_index(device), "power draw", "nvmlDeviceGetPowerUsage"))


def clock_rate(device: DeviceLike = None) -> int:
    """Return the clock of the multiprocessors in MHz, as it is now."""
    return int(_ask(device_index(device), "clock", "nvmlDeviceGetClockInfo", _MULTIPROCESSORS))


def _ask(index: int, what: str, function: str, *arguments: int) -> Any:
    if _driver.initialize().kind == "sim":
        raise UsageError(f"the software device has no {what}: its time is virtual; ask an NVIDIA GPU (--device cuda)")
    with _driver.nvml(get_device_properties(index).uuid) as (pynvml, handle):
        return getattr(pynvml, function)(handle, *arguments)
