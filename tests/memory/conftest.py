"""Allocators over a fake device, and what they emit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fake_provider import FakeProvider

from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import hooks
from cudatool.trace.events import Event


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def make(provider: FakeProvider) -> Callable[..., CachingAllocator]:
    """Make an allocator from a settings string, on a device of so many bytes."""

    def make(conf: str = "", total: int | None = None) -> CachingAllocator:
        if total is not None:
            provider.total = total
        return CachingAllocator(provider, device=0, settings=Settings.parse(conf))

    return make


@pytest.fixture
def allocator(make: Callable[..., CachingAllocator]) -> CachingAllocator:
    return make()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """What is emitted during the test."""
    monkeypatch.setattr(hooks, "strict", True)
    recorded: list[Event] = []
    hooks.subscribe(recorded.append)
    recorded.clear()  # the streams of tests on a device, if some ran before
    yield recorded
    hooks.reset()
