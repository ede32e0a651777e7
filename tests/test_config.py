"""Where compiled code is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudatool import config


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The directory for temporary files; the user has no home."""
    for name in ("CUDATOOL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(config.tempfile, "tempdir", str(tmp_path))
    config._of_this_process.cache_clear()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    return tmp_path


def test_the_cache_is_where_the_user_wants_it(temporary, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "xdg"))
    assert config.cache_directory() == temporary / "xdg" / "cudatool"
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(temporary / "own"))
    assert config.cache_directory() == temporary / "own"


def test_a_user_without_a_home_has_a_cache_of_their_own(temporary, monkeypatch):
    path = config.cache_directory()
    assert path.parent == temporary
    assert path.stat().st_mode & 0o777 == 0o700
    assert config.cache_directory() == path

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert config.cache_directory() == path


def test_a_directory_that_others_can_write_is_not_used(temporary):
    path = config.cache_directory()
    path.chmod(0o777)
    assert config.cache_directory() != path
    assert config.cache_directory() == config.cache_directory()
