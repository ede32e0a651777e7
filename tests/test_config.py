"""Where compiled code is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudatool.config import cache_directory
from cudatool.errors import ConfigError


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_environment_says_where_first_by_our_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", "/ours")
    assert Path("/ours") == cache_directory()
    monkeypatch.delenv("CUDATOOL_CACHE_DIR")
    assert Path("/somewhere/cudatool") == cache_directory()


def test_without_a_home_directory_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDATOOL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="set CUDATOOL_CACHE_DIR"):
        cache_directory()
