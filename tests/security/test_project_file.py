"""Settings of a project: who may have written them, and what they are written in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click import ClickException
from click.testing import CliRunner, Result
from hostile_traces import ESCAPES
from other_user import OTHER_USER
from worst_inputs import racy_trace

from cudatool.cli import group
from cudatool.errors import CudatoolError

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


@pytest.mark.parametrize("name", ["baseline", "checks", "device", "format", "suppress"])
def test_no_text_of_a_project_is_more_than_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    texts = [form + text for text in ESCAPES if text.isascii() for form in ("", "@", "json=", "sim:", "kind=")]
    for number, text in enumerate(texts):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "pyproject.toml").write_text(f"[tool.cudatool]\n{name} = {json.dumps(text)}\n")
        done = sanitize(folder, monkeypatch)
        assert isinstance(done.exception, SystemExit | CudatoolError | ClickException | None), (text, done.exception)


def test_a_null_character_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.cudatool]\nsuppress = ["@a\\u0000b"]\n')
    done = sanitize(tmp_path, monkeypatch)
    assert "pyproject.toml: [tool.cudatool]: suppress has a null character" == str(done.exception)
