from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cudatool.collect import nvml


class NVMLError(Exception):
    pass


def library(*, installed: bool = True, graphics: bool = True) -> SimpleNamespace:
    """Return a stand-in for pynvml: two cards, of which the second has no processes."""
    state = SimpleNamespace(open=0)

    def init() -> None:
        if not installed:
            raise NVMLError("driver not loaded")
        state.open += 1

    def shutdown() -> None:
        state.open -= 1

    def memory(handle: int) -> SimpleNamespace:
        assert state.open == 1
        return SimpleNamespace(total=1000, free=600 - handle, used=400 + handle)

    def compute(handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7, usedGpuMemory=300)] if handle == 0 else []

    def drawing(handle: int) -> list[SimpleNamespace]:
        if not graphics:
            raise NVMLError("not supported")
        return [SimpleNamespace(pid=8, usedGpuMemory=None)] if handle == 0 else []

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=shutdown,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"card {handle}",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=compute,
        nvmlDeviceGetGraphicsRunningProcesses=drawing,
        state=state,
    )


def test_cards_tell_who_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = library()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    first, second = nvml.devices()
    assert nvml.NvmlDevice(0, "card 0", 1000, 600, {7: 300, 8: 0}) == first
    assert (401, {}) == (second.used, second.processes)
    assert 0 == fake.state.open


def test_a_query_that_a_card_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(graphics=False))
    assert {7: 300} == nvml.devices()[0].processes


def test_without_a_driver_there_are_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(installed=False))
    assert () == nvml.devices()
