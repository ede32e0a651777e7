"""What several tests on a GPU share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def start_up_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes find the line of cudatool_child.pth, also where cudatool was installed outside of site-packages."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        'import os\n"CUDATOOL_CHILD" in os.environ and __import__("cudatool.processes.child", None, None, ["start"]).start()\n'
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH")))))
