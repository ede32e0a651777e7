from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudatool.trace import hooks, recorder, stacks


@pytest.fixture(autouse=True)
def fresh_hooks() -> Iterator[None]:
    hooks.reset()
    yield
    hooks.reset()
    stacks.enable(True)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every part of a file small, so that a short recording has many chunks."""
    monkeypatch.setattr(recorder, "_RECORDS_CAPACITY", 3 * 64)
    monkeypatch.setattr(recorder, "_TABLES_CAPACITY", 128)
