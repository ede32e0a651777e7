"""Result files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudatool.errors import OutputError
from cudatool.files import check_writable, whole_file, write_whole
from cudatool.sanitize import Outputs, Report, Run


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_text("old")
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert "old" == path.read_text()
    assert "new" == path.read_text()
    assert [path] == list(tmp_path.iterdir())


def test_a_file_stays_as_it_was_if_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_text("old")
    with pytest.raises(KeyError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert "old" == path.read_text()
    assert [path] == list(tmp_path.iterdir())


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "result", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    with whole_file(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert "new" == path.read_text()


@pytest.mark.parametrize(("where", "why"), [("missing/result", os.strerror(2)), ("file/result", os.strerror(20))])
def test_what_cannot_be_written_is_an_output_error(tmp_path: Path, where: str, why: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / where
    with pytest.raises(OutputError) as caught, whole_file(path) as temporary:
        temporary.write_text("new")
    assert f"cannot write {path}: {why}" == str(caught.value)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text("good")
    return path


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(good, monkeypatch, call):
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(OutputError, match="No space left on device"):
        write_whole(str(good), "new")
    assert "good" == good.read_text()
    assert [good] == list(good.parent.iterdir())


def test_text_is_written_in_utf_8_whatever_it_is(good):
    write_whole(str(good), "new \u20ac \udcff")
    assert "new \u20ac \\udcff" == good.read_text(encoding="utf-8")


def test_a_pipe_or_device_is_written_to_in_place():
    check_writable("/dev/null")
    write_whole("/dev/null", "gone")
    assert not Path("/dev/null").is_file()


def test_looking_changes_nothing(good):
    check_writable(str(good))
    assert "good" == good.read_text()
    assert [good] == list(good.parent.iterdir())


def test_one_file_that_fails_does_not_keep_the_others_from_being_written(good, tmp_path):
    (tmp_path / "folder").mkdir()
    outputs = Outputs.parse([f"json={tmp_path / 'folder' / 'a'}", f"sarif={good}"])
    (tmp_path / "folder").rmdir()  # the workload did it
    printed: list[str] = []
    with pytest.raises(OutputError, match="folder"):
        outputs.write(Report(()), Run(str(tmp_path)), printed.append)
    assert good.read_text().startswith("{")
    assert printed[0].endswith("no findings")
