"""PyTorch's out-of-memory observer and history, against a stand-in that has what torch.cuda has and refuses all else."""

from __future__ import annotations

import ctypes
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cudatool.collect import torch_history
from cudatool.collect.torch_failures import TorchFailures
from cudatool.collect.torch_history import TorchHistory
from cudatool.errors import UsageError
from cudatool.recording.armed import arm

MS, S = 10**6, 10**9


class _Torch(ModuleType):
    """The part of torch that is used: its CUDA may be initialized later, and its observers cannot be detached."""

    def __init__(self, *, cuda: str | None = "13.0", history: bool = False) -> None:
        super().__init__("torch")
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.is_on = history
        self.turned: list[dict[str, object]] = []
        self.waiting: list[Callable[[], None]] = []
        self.allocations = self.reserved = 0
        self.events: list[dict[str, Any]] = []
        self.version = SimpleNamespace(cuda=cuda)
        self._C = SimpleNamespace(
            _cuda_isHistoryEnabled=lambda: self.is_on,
            _cuda_attach_out_of_memory_observer=self.observers.append,
            _cuda_memoryStats=self._stats,
        )
        memory = SimpleNamespace(
            _record_memory_history=self._record, _record_memory_history_impl=self._impl, _snapshot=self._snapshot
        )
        self.cuda = SimpleNamespace(_lazy_call=self.waiting.append, memory=memory, device_count=lambda: 2)

    def initialize(self) -> None:
        for call in self.waiting:
            call()

    def _record(self, enabled: str | None = "all", **given: object) -> None:
        self.is_on = enabled is not None
        self.turned.append({"enabled": enabled, **given})

    def _impl(self, enabled: str | None = "all", *, global_record_annotations: bool = False) -> None:
        """As PyTorch has it, of which only the parameters are looked at."""

    def _stats(self, device: int) -> dict[str, Any]:
        number = 0 if device else 1  # the other device does nothing
        return {
            "allocation": {"all": {"allocated": self.allocations * number}},
            "reserved_bytes": {"all": {"current": self.reserved * number}},
        }

    def _snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [list(self.events), []]}


@pytest.fixture
def seen() -> list[tuple[int, ...]]:
    return []


def _watching(
    torch: _Torch, seen: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, **given: float
) -> TorchFailures:
    monkeypatch.setitem(sys.modules, "torch", torch)
    failures = TorchFailures(lambda *facts: seen.append(facts), **given)
    failures.start()
    return failures


def test_failure_is_told_once_the_cuda_of_torch_is_initialized(seen, monkeypatch):
    torch = _Torch()
    failures = _watching(torch, seen, monkeypatch)
    assert (torch.observers, failures.is_watching) == ([], False)
    torch.initialize()
    torch.observers[0](0, 100, 80, 20)
    assert seen == [(0, 100, 80, 20)]
    assert torch.turned == []


@pytest.mark.parametrize("has_event", [False, True])
def test_a_snapshot_has_the_failure_once_also_without_a_history(seen, monkeypatch, tmp_path: Path, has_event: bool):
    torch = _Torch()
    failures = _watching(torch, seen, monkeypatch)
    torch.initialize()
    late = time.time_ns() // 1000 + 10**12  # by the clock of the history
    torch.events = [{"action": "oom" if has_event else "alloc", "size": 100, "time_us": late}]

    def request() -> None:
        torch.observers[0](0, 100, 80, 20)

    request()
    failures.dump(str(tmp_path / "x.pickle"))
    traces = pickle.loads((tmp_path / "x.pickle").read_bytes())["device_traces"]
    assert (1, 0) == (sum(event["action"] == "oom" for event in traces[0]), len(traces[1]))
    if not has_event:
        event = traces[0][-1]
        assert (100, 20, late) == (event["size"], event["device_free"], event["time_us"])
        assert "request" == event["frames"][0]["name"]


def test_a_snapshot_that_cannot_be_written_leaves_what_was_there(seen, monkeypatch, tmp_path: Path):
    torch = _Torch()
    failures = _watching(torch, seen, monkeypatch)
    torch.initialize()
    (tmp_path / "x.pickle").write_text("before")
    torch.events = [{"action": "alloc", "not": lambda: None}]  # cannot be pickled
    with pytest.raises((AttributeError, pickle.PicklingError)):
        failures.dump(str(tmp_path / "x.pickle"))
    assert [("x.pickle", "before")] == [(path.name, path.read_text()) for path in tmp_path.iterdir()]


def test_a_failure_in_a_thread_without_python_frames_is_told(seen, monkeypatch, tmp_path: Path):
    """A thread of autograd's calls the observer from C."""
    torch = _Torch()
    failures = _watching(torch, seen, monkeypatch)
    torch.initialize()
    library, number = ctypes.CDLL(None), ctypes.c_ulong()
    start = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(partial(torch.observers[0], 0, 100, 80))
    assert library.pthread_create(ctypes.byref(number), None, start, ctypes.c_void_p(20)) == 0
    assert library.pthread_join(number, None) == 0
    assert seen == [(0, 100, 80, 20)]
    failures.dump(str(tmp_path / "x.pickle"))
    (event,) = pickle.loads((tmp_path / "x.pickle").read_bytes())["device_traces"][0]
    assert event["frames"] == []


def test_nothing_is_told_after_the_end(seen, monkeypatch):
    torch = _Torch()
    failures = _watching(torch, seen, monkeypatch)
    torch.initialize()
    failures.stop()
    torch.observers[0](0, 100, 80, 20)
    assert (seen, failures.is_watching) == ([], False)


def test_torch_that_is_initialized_after_the_end_is_left_alone(seen, monkeypatch):
    torch = _Torch()
    _watching(torch, seen, monkeypatch, history_share=1).stop()
    torch.initialize()
    assert (torch.observers, torch.turned) == ([], [])


def test_torch_without_cuda_is_left_alone(seen, monkeypatch):
    torch = _Torch(cuda=None)
    _watching(torch, seen, monkeypatch)
    assert torch.waiting == []


@pytest.mark.parametrize("what", ["_cuda_attach_out_of_memory_observer", "_record_memory_history"])
def test_an_allocator_that_refuses_does_not_stop_the_program(seen, monkeypatch, caplog, what):
    def refuse(*args: object, **given: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support it\nmore")

    torch = _Torch()
    setattr(torch._C if what.startswith("_cuda") else torch.cuda.memory, what, refuse)
    _watching(torch, seen, monkeypatch, history_share=0.5)
    torch.initialize()
    assert ["out-of-memory reports do not know PyTorch: cudaMallocAsync does not yet support it"] == caplog.messages


@pytest.mark.parametrize("history", [False, True])
def test_history_is_kept_for_a_snapshot_unless_the_program_keeps_it(seen, monkeypatch, history):
    torch = _Torch(history=history)
    failures = _watching(torch, seen, monkeypatch, history_share=1)
    torch.initialize()
    assert ["alloc"] * (not history) == [given["context"] for given in torch.turned]  # no stacks of frees
    assert all(given["global_record_annotations"] for given in torch.turned)  # whichever thread turns it off
    failures.stop()
    failures.stop()
    assert [{"enabled": None}] * (not history) == torch.turned[1:]  # what costs the program time ends, too


@pytest.mark.parametrize("history", [False, True])
def test_an_armed_program_may_do_without_the_history(monkeypatch, history):
    torch = _Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    with arm(history=history, on_signal=False):
        torch.initialize()
        assert (1, history) == (len(torch.observers), len(torch.turned) == 1)


def test_a_snapshot_that_pytorch_refuses_is_said_in_one_line(monkeypatch, tmp_path: Path, capfd):
    def refuse() -> None:
        raise RuntimeError("the device is lost")

    torch = _Torch()
    torch.cuda.memory._snapshot = refuse
    monkeypatch.setitem(sys.modules, "torch", torch)
    with arm(history=False, on_signal=False, directory=str(tmp_path)):
        torch.initialize()
        torch.observers[0](0, 100, 80, 20)
    said = capfd.readouterr().err.splitlines()
    assert ["cudatool: memory ran out; its report could not be written (the device is lost)"] == said
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_a_share_of_the_time_is_above_0_and_at_most_1(share):
    with pytest.raises(UsageError, match="history_share is above 0 and at most 1"):
        arm(history_share=share)


class _Clock:
    """A program that allocates so often a second, and is looked at each half second."""

    def __init__(self, torch: _Torch, monkeypatch: pytest.MonkeyPatch, *, share: float = 0.01) -> None:
        self.torch, self.now = torch, 5 * S
        monkeypatch.setattr(torch_history, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(torch_history, "_PERIOD_S", 3600.0)  # only here
        self.history = TorchHistory(torch, share)

    def run(self, seconds: float, *, rate: int) -> float:
        """Return for which part of the time the history was on."""
        on = 0
        for _ in range(int(seconds * 2)):
            on += self.torch.is_on
            self.now += S // 2
            self.torch.allocations += rate // 2
            self.history.look()
        return on / int(seconds * 2)


def test_a_history_costs_what_it_may_whatever_the_rate(monkeypatch):
    for rate in (50_000, 30_000, 10_000):
        clock = _Clock(_Torch(), monkeypatch)
        clock.run(60, rate=rate)  # what it may cost at first is spent
        share = clock.run(1000, rate=rate) * rate * 5_000 / S
        assert 0.009 < share < 0.011
        clock.history.stop()


def test_a_program_that_allocates_seldom_has_its_history_all_the_time(monkeypatch):
    clock = _Clock(_Torch(), monkeypatch)
    assert 1 == clock.run(500, rate=1_900) == clock.history.kept
    assert 1 == len(clock.torch.turned)


def test_the_history_comes_back_when_memory_grows_and_later_seconds_pay_for_it(monkeypatch):
    clock = _Clock(_Torch(), monkeypatch)
    while not clock.run(1, rate=50_000) < 1:  # until what it may cost at first is spent
        pass
    clock.torch.reserved = 1 << 30
    clock.run(0.5, rate=50_000)
    assert clock.torch.is_on
    clock.run(0.5, rate=50_000)
    assert not clock.torch.is_on  # it does not grow any more
    assert 0 == clock.run(5, rate=50_000)
    for _ in range(400):  # it grows for ever
        clock.torch.reserved += 1 << 20
        clock.run(0.5, rate=50_000)
    assert clock.history.kept * 0.25 < 0.0125  # 1 %, and twice 0.2 s of 206 s


def test_a_program_that_turns_its_history_on_or_off_has_it_so(monkeypatch):
    for enabled in ("all", None):
        clock = _Clock(_Torch(), monkeypatch)
        clock.torch.cuda.memory._record_memory_history(enabled=enabled)
        clock.run(100, rate=1_000_000)
        assert clock.torch.is_on == (enabled is not None)
        clock.history.stop()
        assert clock.torch.is_on == (enabled is not None)
        assert 1 == clock.history.kept
        clock.torch.cuda.memory._record_memory_history(enabled="state")  # the function is PyTorch's again
        assert {"enabled": "state"} == clock.torch.turned[-1]


def test_a_program_that_imported_the_function_before_has_its_history_so(monkeypatch):
    torch = _Torch()
    imported = torch.cuda.memory._record_memory_history
    clock = _Clock(torch, monkeypatch)
    imported(enabled=None)
    clock.run(100, rate=0)
    assert not torch.is_on


def test_the_part_of_the_time_is_in_the_snapshot(seen, monkeypatch, tmp_path: Path):
    torch = _Torch()
    monkeypatch.setattr(torch_history, "_PERIOD_S", 0.01)
    failures = _watching(torch, seen, monkeypatch, history_share=0.01)
    torch.initialize()
    deadline = time.monotonic() + 30
    while torch.is_on and time.monotonic() < deadline:  # the thread looks, and turns it off
        torch.allocations += 10**6
        time.sleep(0.01)
    time.sleep(0.02)
    failures.dump(str(tmp_path / "x.pickle"))
    failures.stop()
    assert 0 < pickle.loads((tmp_path / "x.pickle").read_bytes())["history_kept"] < 1
