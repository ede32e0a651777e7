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


def test_a_file_does_not_differ_from_itself() -> None:
    result = run(STREAMS, STREAMS)
    assert 0 == result.exit_code
    assert "train.py" not in result.stdout
    assert "5 call sites hold the same in both" in result.stdout


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
