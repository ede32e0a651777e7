"""What JAX is asked about its memory, and when it is not asked."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cudatool.collect import jax_memory
from cudatool.collect.jax_memory import JaxMemory
from cudatool.collect.jax_profile import Held, held
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Kind
from cudatool.trace.model import Frame


class Device:
    def __init__(self, ordinal: int, platform: str = "gpu") -> None:
        self.local_hardware_id, self.id, self.platform = ordinal, ordinal, platform
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


PROFILE = Path(__file__).parents[1] / "data" / "jax_memory_profile.pb.gz"
"""By JAX 0.10.2, on processors: arrays of `make`, a comprehension of line 4, and one made at line 7 of program.py."""


def test_a_profile_says_what_each_line_holds():
    found = [
        (one.device, one.count, one.size, [frame.line for frame in one.frames if frame.file.endswith("program.py")])
        for one in held(PROFILE.read_bytes())
        if one.kind == "buffer"
    ]
    assert sorted(found) == [
        ("cpu:0", 1, 40_000, [4, 4, 6]),
        ("cpu:0", 1, 4_000_000, [7]),
        ("cpu:0", 2, 80_000, [4, 4, 6]),
    ]
    assert {"executable"} == {one.kind for one in held(PROFILE.read_bytes()) if not one.device}
    functions = [frame.function for one in held(PROFILE.read_bytes()) for frame in one.frames]
    assert {"make", "<module>", "_convert_element_type"} <= set(functions)


def test_numbers_may_be_packed_or_not_and_unknown_fields_are_passed_over():
    def number(value):
        return bytes([value & 0x7F | 0x80, value >> 7]) if value > 0x7F else bytes([value])

    def message(field, data):
        return number(field << 3 | 2) + number(len(data)) + data

    texts = [b"", b"kind", b"buffer", b"device", b"gpu:1", b"f", b"a.py"]
    labels = message(3, b"\x08\x01\x10\x02") + message(3, b"\x08\x03\x10\x04")
    places, values = b"\x08\x01", b"\x10\x03" + b"\x10" + number(500)  # not packed, as PyPI's pprof writes them
    other = b"\x49" + bytes(8) + b"\x55" + bytes(4)  # fields 9 and 10 of 8 and 4 bytes
    profile = message(2, places + values + labels) + other
    profile += message(4, b"\x08\x01" + message(4, b"\x08\x07\x10" + number(300)))
    profile += message(5, b"\x08\x07\x10\x05\x20\x06") + b"".join(message(6, text) for text in texts)
    (one,) = held(gzip.compress(profile))
    assert one == Held("gpu:1", "buffer", 3, 500, (Frame("a.py", "f", 300),))


@pytest.mark.parametrize(
    "data",
    [b"no gzip", gzip.compress(b"\x12\x03\x0a\x01\x05"), gzip.compress(b"\x0a\x80")],
    ids=["no gzip", "a location that is not there", "cut"],  # gzip writes the time
)
def test_what_is_no_profile_is_refused(data):
    with pytest.raises((ValueError, IndexError, KeyError, EOFError, OSError)):
        held(data)


@pytest.fixture
def profiles(jax, monkeypatch):
    """What JAX is asked for: the number of profiles so far, which are those of two GPUs and of the host."""
    made = []

    def profile():
        made.append(None)
        if jax.fails:
            raise RuntimeError("no profile")
        return b""

    frames = (Frame("/home/me/train.py", "load", 7),)
    said = [
        Held("gpu:5", "buffer", 2, 60, frames),
        Held("gpu:4", "buffer", 1, 40, frames),
        Held("cpu:5", "buffer", 1, 9, frames),
        Held("", "executable", 1, 3, frames),
        Held("gpu:77", "buffer", 1, 1, frames),
    ]
    monkeypatch.setattr(jax_memory, "held", lambda data: said)
    jax.profiler = SimpleNamespace(device_memory_profile=profile)
    for device, number in zip(jax.devices, (5, 4), strict=True):
        device.id = number
    jax.is_started = True
    return made


@pytest.fixture
def held_events():
    events = []
    hooks.subscribe(events.append)
    yield lambda: [event for event in events if event.kind is Kind.POOL_HELD]
    hooks.unsubscribe(events.append)


def test_a_profile_is_told_by_call_site_of_the_devices_that_are_gpus(profiles, held_events):
    JaxMemory().sample()
    found = held_events()
    assert [(1, 60, 2, "JAX"), (0, 40, 1, "JAX")] == [
        (event.device, event.size, event.aux0, event.name) for event in found
    ]
    assert 1 == len({event.correlation for event in found})
    assert {"/home/me/train.py"} == {frame.file for event in found for frame in stacks.frames(event.stack)}


def test_profiles_are_made_when_clearly_more_is_in_use_and_at_the_end_when_anything_is(jax, profiles, monkeypatch):
    time = [0]
    monkeypatch.setattr(jax_memory, "monotonic_ns", lambda: time[0])
    memory = JaxMemory()
    memory.sample()
    for in_use, last, expected in ((101, False, 1), (103, False, 2), (50, True, 2), (104, False, 2), (104, True, 3)):
        jax.devices[0].stats["bytes_in_use"] = in_use
        memory.sample(last=last)
        assert expected == len(profiles), (in_use, last)


def test_profiles_take_a_hundredth_of_the_time_at_most(jax, profiles, monkeypatch):
    time = [0]
    monkeypatch.setattr(jax_memory, "monotonic_ns", lambda: time[0])
    memory, profile = JaxMemory(), jax.profiler.device_memory_profile

    def slow():
        time[0] += 10
        return profile()

    jax.profiler.device_memory_profile = slow
    for now, expected in ((0, 1), (999, 1), (1001, 2), (1500, 2), (2100, 3)):
        time[0] = max(now, time[0])
        jax.devices[0].stats["bytes_in_use"] *= 2
        memory.sample()
        assert expected == len(profiles), now


def test_arrays_in_the_place_of_what_a_computation_needed_are_found_later(jax, profiles, held_events, monkeypatch):
    """At the first profile something is in use that no array has; then an array gets as much."""
    time = [0]
    monkeypatch.setattr(jax_memory, "monotonic_ns", lambda: time[0])
    memory = JaxMemory()
    memory.sample()
    assert (1, 2) == (len(profiles), len(held_events()))
    said = jax_memory.held(b"")
    monkeypatch.setattr(jax_memory, "held", lambda data: [*said, Held("gpu:5", "buffer", 1, 40, ())])
    for now, made, told in ((0.9, 1, 2), (1.0, 2, 4), (2.5, 2, 4), (3.0, 3, 4), (6.5, 3, 4), (7.0, 4, 4)):
        time[0] = int(now * 1e9)
        memory.sample()
        assert (made, told) == (len(profiles), len(held_events())), now
    assert [60, 40] == [event.size for event in held_events()[2:]]  # of the device that holds more


def test_a_profile_that_fails_says_nothing(jax, profiles, held_events):
    jax.fails = False
    memory = JaxMemory()
    jax.profiler.device_memory_profile = lambda: [].pop()
    memory.sample()
    assert [] == held_events()
