"""PyTorch's out-of-memory observer, against a stand-in that has what torch.cuda has and refuses all else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from cudatool.collect.torch_failures import TorchFailures
from cudatool.recording.armed import arm


class _Torch(ModuleType):
    """The part of torch that is used: its CUDA may be initialized later, and its observers cannot be detached."""

    def __init__(self, *, cuda: str | None = "13.0", history: bool = False) -> None:
        super().__init__("torch")
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.history: list[dict[str, object]] = []
        self.waiting: list[Callable[[], None]] = []
        self.dumped: list[str] = []
        self.version = SimpleNamespace(cuda=cuda)
        self._C = SimpleNamespace(
            _cuda_isHistoryEnabled=lambda: history, _cuda_attach_out_of_memory_observer=self.observers.append
        )
        memory = SimpleNamespace(
            _record_memory_history=lambda **given: self.history.append(given), _dump_snapshot=self.dumped.append
        )
        self.cuda = SimpleNamespace(_lazy_call=self.waiting.append, memory=memory)

    def initialize(self) -> None:
        for call in self.waiting:
            call()


@pytest.fixture
def seen() -> list[tuple[int, ...]]:
    return []


def _watching(
    torch: _Torch, seen: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, **given: bool
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
    assert torch.history == []
    failures.dump("x.pickle")
    assert torch.dumped == ["x.pickle"]


def test_nothing_is_told_after_the_end(seen, monkeypatch):
    torch = _Torch()
    failures = _watching(torch, seen, monkeypatch)
    torch.initialize()
    failures.stop()
    torch.observers[0](0, 100, 80, 20)
    assert (seen, failures.is_watching) == ([], False)


def test_torch_that_is_initialized_after_the_end_is_left_alone(seen, monkeypatch):
    torch = _Torch()
    _watching(torch, seen, monkeypatch, with_history=True).stop()
    torch.initialize()
    assert (torch.observers, torch.history) == ([], [])


def test_torch_without_cuda_is_left_alone(seen, monkeypatch):
    torch = _Torch(cuda=None)
    _watching(torch, seen, monkeypatch)
    assert torch.waiting == []


@pytest.mark.parametrize("history", [False, True])
def test_history_is_kept_for_a_snapshot_unless_the_program_keeps_it(seen, monkeypatch, history):
    torch = _Torch(history=history)
    failures = _watching(torch, seen, monkeypatch, with_history=True)
    torch.initialize()
    assert ["alloc"] * (not history) == [given["context"] for given in torch.history]  # no stacks of frees
    failures.stop()
    failures.stop()
    assert [{"enabled": None}] * (not history) == torch.history[1:]  # what costs the program time ends, too


@pytest.mark.parametrize("history", [False, True])
def test_an_armed_program_may_do_without_the_history(monkeypatch, history):
    torch = _Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    with arm(history=history, on_signal=False):
        torch.initialize()
        assert (1, history) == (len(torch.observers), len(torch.history) == 1)
