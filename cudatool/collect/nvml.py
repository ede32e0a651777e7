"""Reads from NVML which processes use the memory of this machine's NVIDIA devices now."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NvmlDevice", "devices"]


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One device's memory.

    Attributes
    ----------
    index, name
        As NVML numbers and names it. CUDA may number devices in another order.
    total, free
        Bytes.
    processes
        Bytes by process id, for those that NVML shows. In a container the ids may be the host's.
    """

    index: int
    name: str
    total: int
    free: int
    processes: dict[int, int]

    @property
    def used(self) -> int:
        """Bytes that are not free."""
        return self.total - self.free


def devices() -> tuple[NvmlDevice, ...]:
    """Return the memory of each device; empty if there is no NVIDIA driver, or it does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_device(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _device(index: int) -> NvmlDevice:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes: dict[int, int] = {}
    for running in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            found = running(handle)
        except pynvml.NVMLError:  # not on every device, and not for every user
            continue
        processes |= {int(process.pid): int(process.usedGpuMemory or 0) for process in found}
    name = str(pynvml.nvmlDeviceGetName(handle))
    return NvmlDevice(index, name, int(memory.total), int(memory.free), processes)
