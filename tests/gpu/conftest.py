"""What several tests on a GPU share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cudatool._driver import gpu_names, initialize


class _NoGpu(pytest.Module):
    """A file of tests that is imported, as it would be with a GPU, and skipped as one."""

    def collect(self) -> Iterator[pytest.Item]:
        assert self.obj
        pytest.skip("no NVIDIA GPU answers", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip files where no test of theirs can run: to skip each of 1,500 tests takes both workers many seconds."""
    return None if gpu_names() else _NoGpu.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch on the GPU that this process uses, too."""
    found = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not found.cuda.is_available() or initialize().kind != "cuda":
        pytest.skip("PyTorch and this process do not both use a GPU")
    return found


@pytest.fixture
def start_up_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes find the line of cudatool_child.pth, also where cudatool was installed outside of site-packages."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        'import os\n"CUDATOOL_CHILD" in os.environ and __import__("cudatool.processes.child", None, None, ["start"]).start()\n'
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH")))))
