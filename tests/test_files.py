"""Result files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudatool.errors import OutputError
from cudatool.files import whole_file


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
