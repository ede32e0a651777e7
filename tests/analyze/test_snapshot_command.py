from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cudatool.cli.snapshot import snapshot
from cudatool.errors import FileFormatError, UsageError

RECORDING = Path(__file__).resolve().parents[1] / "data" / "streams_default.pickle.xz"


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str | Path) -> Result:
    """Run the command; what it raises is for the command group to print."""
    return CliRunner().invoke(snapshot, [str(a) for a in arguments], catch_exceptions=False)


def test_the_summary_fits_80_columns() -> None:
    lines = run(RECORDING).stdout.splitlines()
    assert any(line.startswith("Allocated") and line.endswith("22.5 MiB") for line in lines)
    assert any(line.startswith("train.py:") for line in lines)
    assert [] == [line for line in lines if len(line) > 80 and str(RECORDING) not in line]


def test_json_has_the_schema_and_raw_bytes() -> None:
    result = run(RECORDING, "--json")
    document = json.loads(result.stdout)
    assert "cudatool.snapshot/1" == document["schema"]
    assert 23592448 == document["devices"][0]["peak_active"]
    assert "" == result.stderr


def test_a_page_lies_beside_its_source(tmp_path: Path) -> None:
    source = tmp_path / "x.pickle.xz"
    source.write_bytes(RECORDING.read_bytes())
    result = run(source, "--html")
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")
    assert f"Wrote {tmp_path}/x.html (" in result.stderr
    assert ["x.html", "x.pickle.xz"] == sorted(path.name for path in tmp_path.iterdir())


def test_html_before_the_source_takes_nothing_from_it(tmp_path: Path) -> None:
    source = tmp_path / "x.pickle.xz"
    source.write_bytes(RECORDING.read_bytes())
    run("--html", source)
    assert (tmp_path / "x.html").exists()
    assert RECORDING.read_bytes() == source.read_bytes()


def test_a_page_without_a_name_goes_beside_its_source(tmp_path: Path) -> None:
    source = tmp_path / "own.pickle.xz"
    source.write_bytes(RECORDING.read_bytes())
    for words in (["--html", source], [source, "--html"]):
        run(*words)
        (tmp_path / "own.html").unlink()


def test_a_named_page_goes_there(tmp_path: Path) -> None:
    run(RECORDING, "--html", "there.html")
    assert (tmp_path / "there.html").exists()


@pytest.mark.parametrize("option", ["--html", "--torch"])
def test_nothing_is_overwritten_without_force(tmp_path: Path, option: str) -> None:
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(UsageError, match="add -f"):
        run(RECORDING, option, "mine.html")
    assert "mine" == (tmp_path / "mine.html").read_text()
    run(RECORDING, option, "mine.html", "-f")
    assert "mine" != (tmp_path / "mine.html").read_bytes()[:4].decode(errors="replace")


@pytest.mark.parametrize("option", ["--html", "--torch"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_source_is_never_overwritten(tmp_path: Path, option: str, link: Callable[[str, str], None]) -> None:
    source = tmp_path / "own.pickle.xz"
    source.write_bytes(RECORDING.read_bytes())
    link(str(source), "page.html")
    with pytest.raises(UsageError, match="this command reads that file"):
        run(source, option, "page.html", "-f")
    assert RECORDING.read_bytes() == source.read_bytes()


def test_a_torch_pickle_holds_plain_data(tmp_path: Path) -> None:
    run(RECORDING, "--torch", "x.pickle")
    written = pickle.loads((tmp_path / "x.pickle").read_bytes())
    assert {"segments", "device_traces"} <= written.keys()
    assert 6 == len(written["segments"])
    assert 2948 == len(written["device_traces"][0])


def test_without_a_trace_the_way_to_one_is_named() -> None:
    with pytest.raises(UsageError, match="cudatool run"):
        run()


def test_a_missing_source_is_said_to_be_missing() -> None:
    with pytest.raises(UsageError, match="cannot read"):
        run("missing.ctrace")


@pytest.mark.parametrize("content", [b"", b"text", b"\x80"])
def test_a_foreign_file_is_refused_and_nothing_is_written(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FileFormatError, match="x"):
        run("x", "--html")
    assert ["x"] == [path.name for path in tmp_path.iterdir()]


def test_names_from_a_file_are_text_on_the_terminal(tmp_path: Path) -> None:
    frames = [{"filename": "[red]a.py", "line": 1, "name": "\x1b[31mf"}]
    trace = [{"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "frames": frames}]
    (tmp_path / "x").write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    assert "[red]a.py:1 (\\x1b[31mf)" in run("x").stdout


def test_advice_to_change_a_setting_names_the_command_that_tries_it() -> None:
    source = RECORDING.with_name("prefetch__default.pickle.xz")
    assert f"Next: cudatool replay {source}   (what" in run(source).stderr
