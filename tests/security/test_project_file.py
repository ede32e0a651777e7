"""Settings of a project: who may have written them, and what they are written in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from other_user import OTHER_USER
from worst_inputs import racy_trace

from cudatool.cli import group

HIDES = '[tool.cudatool]\nsuppress = "kind=*"\n'


def sanitize(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    folder.mkdir(exist_ok=True)
    (folder / "racy.ctrace").write_bytes(racy_trace())
    monkeypatch.chdir(folder)
    return CliRunner().invoke(group, ["sanitize", "racy.ctrace"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_settings_of_another_user_do_not_hide_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "pyproject.toml"
    planted.write_text(HIDES)
    os.chown(planted, OTHER_USER, OTHER_USER)
    done = sanitize(tmp_path / "mine", monkeypatch)
    assert 1 == done.exit_code
    assert f"../pyproject.toml are not used: the file belongs to user {OTHER_USER}\n" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_settings_of_the_owner_of_the_working_directory_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as root over a checkout of someone else."""
    (tmp_path / "pyproject.toml").write_text(HIDES)
    (tmp_path / "mine").mkdir()
    for path in (tmp_path / "pyproject.toml", tmp_path / "mine"):
        os.chown(path, OTHER_USER, OTHER_USER)
    assert 0 == sanitize(tmp_path / "mine", monkeypatch).exit_code


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_settings_that_are_not_utf_8_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    (tmp_path / "pyproject.toml").write_bytes(f"# é\n{HIDES}".encode(encoding))
    done = sanitize(tmp_path, monkeypatch)
    assert "pyproject.toml is not UTF-8, as TOML is (byte " in str(done.exception)
