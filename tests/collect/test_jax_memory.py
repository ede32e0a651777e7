"""What JAX is asked about its memory, and when it is not asked."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from cudatool.collect.jax_memory import JaxMemory
from cudatool.trace import hooks
from cudatool.trace.events import Kind


class Device:
    def __init__(self, ordinal: int, platform: str = "gpu") -> None:
        self.local_hardware_id, self.platform = ordinal, platform
        self.stats = {"num_allocs": 3, "bytes_in_use": 100, "peak_bytes_in_use": 300, "bytes_limit": 1000}

    def memory_stats(self):
        if self.platform != "gpu":
            raise AssertionError("JAX was asked about a device that is no GPU")
        return self.stats


class Jax(ModuleType):
    """JAX with its backend, which `local_devices` would start."""

    def __init__(self) -> None:
        super().__init__("jax")
        self.is_started, self.devices, self.fails = False, [Device(1), Device(0)], False
        self.bridge = ModuleType("jax._src.xla_bridge")
        self.bridge.backends_are_initialized = lambda: self.is_started

    def local_devices(self):
        assert self.is_started, "this starts JAX's backend"
        if self.fails:
            raise RuntimeError("Backend 'cuda' failed to initialize")
        return self.devices


@pytest.fixture
def jax(monkeypatch):
    found = Jax()
    monkeypatch.setitem(sys.modules, "jax", found)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", found.bridge)
    return found


@pytest.fixture
def sampled():
    """Ask once more, and return what was said of which device."""
    events, memory = [], JaxMemory()
    hooks.subscribe(events.append)

    def sample():
        events.clear()
        memory.sample()
        return [(event.device, event.size, event.aux0, event.aux1) for event in events if event.kind is Kind.POOL_USE]

    yield sample
    hooks.unsubscribe(events.append)


def test_each_gpu_says_what_is_in_use_was_at_most_and_may_be(jax, sampled):
    jax.is_started = True
    assert [(1, 100, 300, 1000), (0, 100, 300, 1000)] == sampled()


def test_only_what_has_changed_is_said_again(jax, sampled):
    jax.is_started = True
    sampled()
    jax.devices[1].stats = {**jax.devices[1].stats, "bytes_in_use": 40}
    assert [(0, 40, 300, 1000)] == sampled()
    assert [] == sampled()


def test_jax_that_uses_no_device_is_not_asked(jax, sampled):
    assert [] == sampled()


@pytest.mark.parametrize("module", ["jax", "jax._src.xla_bridge"])
def test_without_jax_nothing_is_asked(jax, sampled, monkeypatch, module):
    jax.is_started = True
    monkeypatch.delitem(sys.modules, module)
    assert [] == sampled()


def test_a_device_that_is_no_gpu_or_does_not_count_says_nothing(jax, sampled):
    jax.is_started = True
    jax.devices = [Device(0, "cpu"), Device(2)]
    jax.devices[1].stats = None
    assert [] == sampled()


def test_an_error_of_jax_stays_in_there(jax, sampled):
    jax.is_started = jax.fails = True
    assert [] == sampled()
    jax.fails = False
    assert 2 == len(sampled())
