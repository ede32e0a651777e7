from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from cudatool import analyze, progress
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Trace


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    # The module's own `sys`: pytest puts its capture into sys.stderr anew before each phase of a test.
    stderr = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))
    return stderr


def test_nothing_is_shown_within_two_seconds(clock: list[float], terminal: Terminal) -> None:
    with progress.step("reading", total=10) as step:
        clock[0] += 1.9
        step.update(5)
    assert "" == terminal.getvalue()


def test_the_share_is_shown_after_two_seconds_and_wiped_at_the_end(clock: list[float], terminal: Terminal) -> None:
    with progress.step("reading", total=200) as step:
        clock[0] += 2
        step.update(85)
        assert "\r\x1b[Kreading: 42 %" == terminal.getvalue()
    assert terminal.getvalue().endswith("42 %\r\x1b[K")


def test_the_line_is_written_ten_times_a_second_at_most(clock: list[float], terminal: Terminal) -> None:
    with progress.step("reading", total=1000) as step:
        clock[0] += 2
        for i in range(1000):
            clock[0] += 0.001
            step.update(i)
        assert 10 == terminal.getvalue().count("reading")


def test_an_inner_step_counts_from_the_outermost(clock: list[float], terminal: Terminal) -> None:
    with progress.step("all of it"):
        clock[0] += 3
        with progress.step("compiling 12 kernels"):
            assert "\r\x1b[Kcompiling 12 kernels ..." == terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_nothing_is_shown_where_stderr_is_no_terminal(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))
    with progress.step("reading", total=2) as step:
        clock[0] += 9
        step.update(1)
    assert "" == stderr.getvalue()


def test_a_name_with_control_characters_cannot_move_the_cursor(clock: list[float], terminal: Terminal) -> None:
    clock[0] += 3
    with progress.step("reading \x1b[2Ja\nb" + "x" * 99) as step:
        clock[0] += 3
        step.update(1)
    (line,) = terminal.getvalue().split("\r\x1b[K")[1:-1]
    assert "reading ?[2Ja?bxxxxxxxxxxxxxx" == line


def test_a_failed_step_leaves_no_line(clock: list[float], terminal: Terminal) -> None:
    with pytest.raises(KeyError), progress.step("reading", total=2) as step:
        clock[0] += 3
        step.update(1)
        raise KeyError
    assert terminal.getvalue().endswith("\r\x1b[K")
    with progress.step("again"):
        pass
    assert "again" not in terminal.getvalue()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("analysis", [analyze.report, analyze.leaks_of])
def test_an_analysis_ends_with_all_of_its_parts_done(
    analysis: Callable[[Trace], object], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = np.zeros(3 * 60 * devices, RECORD)
    records["kind"] = np.tile([Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED], 60 * devices)
    records["device"] = np.repeat(np.arange(60 * devices) % devices, 3)
    records["address"], records["size"], records["aux0"] = 1 << 21, 512, 500
    shown: list[str] = []
    update = progress.Step.update
    monkeypatch.setattr(progress.Step, "update", lambda step, done: (update(step, done), shown.append(str(step)))[0])
    analysis(Trace(records))
    parts = [text for text in shown if not text.startswith("replaying")]
    assert len(parts) > 5
    assert parts[-1].endswith(": 100 %")
    assert sorted(set(parts), key=parts.index) == parts  # each moves the line
