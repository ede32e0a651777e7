"""Building what watches PyTorch: whatever goes wrong is one error, which never reaches the program's import."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cudatool.collect.torch_build import TorchBuildError, load


@pytest.fixture
def torch() -> ModuleType:
    found = ModuleType("torch")
    found.__version__ = "0.1"
    found.version = SimpleNamespace(git_version="abc", cuda=None)
    return found


def test_a_cache_that_cannot_be_written_is_a_build_error(
    torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(TorchBuildError, match=r"0\.1 cannot be built: .*Not a directory"):
        load(torch)


def test_a_module_that_cannot_be_loaded_is_a_build_error(
    torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made.so"
    made.write_bytes(b"not a library")
    monkeypatch.setattr("cudatool.collect.torch_build._built", lambda torch: made)
    with pytest.raises(TorchBuildError, match=r"0\.1 cannot be built: .*made\.so"):
        load(torch)
