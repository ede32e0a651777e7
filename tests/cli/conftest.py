"""The command line as a user runs it: in its own process, in an empty directory, on the software device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest

Completed = subprocess.CompletedProcess


@pytest.fixture
def run_command(tmp_path, monkeypatch) -> Callable[..., Completed]:
    """Run ``cudatool ARGS`` in `tmp_path`, with more of an `environment` if need be."""
    usual = {**os.environ, "CUDATOOL_DEVICE": "sim", "COLUMNS": "80", "NO_COLOR": "1"}

    def run(*arguments: object, environment: Mapping[str, str] = MappingProxyType({}), **kwargs: object) -> Completed:
        command = [sys.executable, "-c", "from cudatool.cli import main; main()", *map(str, arguments)]
        options = {"cwd": tmp_path, "env": usual | environment, "timeout": 240, **kwargs}
        return subprocess.run(command, capture_output=True, text=True, **options)

    return run


@pytest.fixture
def plain_python(tmp_path) -> Callable[..., Completed]:
    """Run ``python ARGS`` in `tmp_path`."""

    def run(*arguments: object) -> Completed:
        return subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )

    return run
