from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cudatool.cli.diff import diff
from cudatool.errors import UsageError

DATA = Path(__file__).resolve().parents[1] / "data"
STREAMS, PREFETCH = DATA / "streams_default.pickle.xz", DATA / "prefetch__default.pickle.xz"


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(diff, [str(a) for a in arguments], catch_exceptions=False)


def test_peaks_stand_first_and_sites_follow_by_difference() -> None:
    lines = run(STREAMS, PREFETCH).stdout.splitlines()
    active = next(line for line in lines if line.startswith("Active"))
    assert ["Active", "22.5", "MiB", "712.29", "MiB", "+689.79", "MiB"] == active.split()
    assert lines.index(active) < next(i for i, line in enumerate(lines) if "train.py" in line)
    assert [] == [line for line in lines if len(line) > 80]
    assert "\n".join(lines).isascii()  # on any terminal
    assert any(line.endswith("  0 to 11") for line in lines)


def test_a_file_does_not_differ_from_itself() -> None:
    result = run(STREAMS, STREAMS)
    assert 0 == result.exit_code
    assert "train.py" not in result.stdout
    assert "5 call sites hold the same in both" in result.stdout


def test_one_call_site_holds(tmp_path: Path) -> None:
    log = tmp_path / "rmm.csv"
    log.write_text("Thread,Time,Action,Pointer,Size,Stream\n1,14:21:19.998533,allocate,0x30a000000,256,0x2\n")
    assert "1 call site holds the same in both" in run(log, log).stdout


def test_json_has_every_row_in_bytes() -> None:
    result = run(STREAMS, PREFETCH, "--json")
    document = json.loads(result.stdout)
    assert ("cudatool.diff/1", str(STREAMS), str(PREFETCH)) == (
        document["schema"],
        document["before"],
        document["after"],
    )
    (device,) = document["devices"]
    assert 23592448 == device["before"] == sum(row["before"] for row in device["rows"])
    assert device["after"] == sum(row["after"] for row in device["rows"])
    assert all(row["change"] == row["after"] - row["before"] for row in device["rows"])
    assert {"functions", "names", "function", "size", "only in one"} >= {row["matched_by"] for row in device["rows"]}


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot read missing\.pickle"):
        run(STREAMS, "missing.pickle")


def test_the_page_is_written_and_replaces_no_input(run_command, tmp_path: Path) -> None:
    recording = tmp_path / "own.pickle.xz"
    recording.write_bytes((Path(__file__).parents[1] / "data" / "streams_default.pickle.xz").read_bytes())
    before = recording.read_bytes()
    done = run_command("diff", recording.name, recording.name, "--html", "diff.html")
    assert 0 == done.returncode
    assert "Wrote diff.html" in done.stderr
    assert (tmp_path / "diff.html").read_text().startswith("<!DOCTYPE html>")
    assert 2 == run_command("diff", recording.name, recording.name, "--html", "diff.html").returncode
    assert 2 == run_command("diff", recording.name, recording.name, "-f", "--html", recording.name).returncode
    assert before == recording.read_bytes()
