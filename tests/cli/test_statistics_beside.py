"""NAME.stats.json beside NAME.pickle: what a PyTorch snapshot lacks, for every command alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from cudatool import analyze
from cudatool.cli import group
from cudatool.cli._part import part_of
from cudatool.cli._sources import read_trace

SNAPSHOT = Path(__file__).resolve().parents[1] / "data" / "streams_default.pickle.xz"
CARD = 16 << 30


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    shutil.copy(SNAPSHOT, tmp_path / "x.pickle.xz")
    return tmp_path / "x.pickle.xz"


def beside(snapshot: Path, **facts: object) -> Path:
    (snapshot.parent / "x.stats.json").write_text(json.dumps(facts))
    return snapshot


@pytest.mark.parametrize("fraction", [0.25, "0.25"])
def test_the_memory_fraction_is_one_of_the_recorded_settings(snapshot: Path, fraction: object) -> None:
    settings, _ = analyze.recorded_settings(read_trace(beside(snapshot, memory_fraction=fraction)))
    assert (0.25, "per_process_memory_fraction:0.25") == (settings.per_process_memory_fraction, settings.text)


@pytest.mark.parametrize("fraction", [None, ""])
def test_no_memory_fraction_was_set(snapshot: Path, fraction: object, capsys: pytest.CaptureFixture[str]) -> None:
    settings, _ = analyze.recorded_settings(read_trace(beside(snapshot, memory_fraction=fraction)))
    assert settings.per_process_memory_fraction is None
    assert "" == capsys.readouterr().err


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, "much", "1e999", True, [0.5], float("nan")], ids=repr)
def test_what_is_no_fraction_is_not_used(snapshot: Path, fraction: object, capsys: pytest.CaptureFixture[str]) -> None:
    settings, _ = analyze.recorded_settings(read_trace(beside(snapshot, memory_fraction=fraction)))
    assert settings.per_process_memory_fraction is None
    assert "memory_fraction is not used: it is no number from 0 to 1" in capsys.readouterr().err


def test_snapshot_and_replay_know_the_same_card(snapshot: Path) -> None:
    beside(snapshot, device_total_bytes=CARD, memory_fraction=0.5)
    report = json.loads(CliRunner().invoke(group, ["snapshot", "--json", str(snapshot)]).stdout)
    assert [CARD] == [device["diagnosis"]["outside"]["total"] for device in report["devices"]]
    tried = json.loads(CliRunner().invoke(group, ["replay", "--json", "--conf", "", str(snapshot)]).stdout)
    assert ["per_process_memory_fraction:0.5"] == [row["replay_of_recorded"]["conf"] for row in tried]


def test_statistics_are_of_the_whole_recording(snapshot: Path) -> None:
    trace = read_trace(beside(snapshot, stats={"reserved_bytes.all.peak": 1}))
    assert {"reserved_bytes.all.peak": 1} == trace.header["memory_stats"]
    whole, part = (
        CliRunner().invoke(group, ["replay", "--check", "--json", str(snapshot), *more])
        for more in ([], ["--events", "0:100"])
    )
    assert ["reserved_bytes.all.peak"] == list(json.loads(whole.stdout)[0]["stats_differ"])
    assert {} == json.loads(part.stdout)[0]["stats_differ"]
    assert "window" in part_of(trace, "0:100", None).header
