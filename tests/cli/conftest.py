"""The command line as a user runs it: in an empty directory, on the software device.

What runs a program does so in a process of its own: one that has loaded nothing of cudatool where tests are about
processes (`run_command`), one that has imported what it needs where they are about reports (`run_warm`). Commands that
read files run in this process: one of them takes less time than a process needs to start.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
from warm_process import COMMAND_LINE, run_python

from cudatool.cli import main

Completed = subprocess.CompletedProcess


_READS_FILES = frozenset({"diff", "export", "leaks", "ptx", "replay", "snapshot"})
_ENVIRONMENT = MappingProxyType({"CUDATOOL_DEVICE": "sim", "COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture
def run_here(tmp_path, monkeypatch) -> Callable[..., Completed]:
    """Run ``cudatool ARGS`` in `tmp_path` and in this process: a command that reads files, or one that is refused."""

    def run(*arguments: object) -> Completed:
        words = [str(argument) for argument in arguments]
        with monkeypatch.context() as patch:
            for name, value in _ENVIRONMENT.items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["cudatool", *words])
            return _in_this_process(words)

    return run


@pytest.fixture
def run_command(tmp_path, run_here) -> Callable[..., Completed]:
    """Run ``cudatool ARGS`` in `tmp_path`; with options of :mod:`subprocess`, or variables that are for Python, in an
    interpreter that has just begun.
    """

    def run(*arguments: object, environment: Mapping[str, str] = MappingProxyType({}), **kwargs: object) -> Completed:
        words = [*map(str, arguments)]
        if not kwargs and not any(name.startswith("PYTHON") for name in environment):
            if not environment and words and words[0] in _READS_FILES:
                return run_here(*words)
            variables = _ENVIRONMENT | environment
            return run_python(COMMAND_LINE, *words, folder=tmp_path, environment=variables, is_half=True)
        command = [sys.executable, "-c", COMMAND_LINE, *words]
        options = {"cwd": tmp_path, "env": os.environ | _ENVIRONMENT | environment, "timeout": 240, **kwargs}
        return subprocess.run(command, capture_output=True, text=True, **options)

    return run


@pytest.fixture
def run_warm(tmp_path, run_command) -> Callable[..., Completed]:
    """Run ``cudatool ARGS`` as `run_command` does, in a process that has its imports done; not if they depend on more."""

    def run(*arguments: object, environment: Mapping[str, str] = MappingProxyType({}), **kwargs: object) -> Completed:
        is_read = arguments and arguments[0] in _READS_FILES
        if kwargs or is_read or any(name.startswith("PYTHON") for name in environment):
            return run_command(*arguments, environment=environment, **kwargs)
        variables = _ENVIRONMENT | environment
        return run_python(COMMAND_LINE, *map(str, arguments), folder=tmp_path, environment=variables)

    return run


def _in_this_process(words: list[str]) -> Completed:
    """Run the command line as :data:`sys.argv` has it, and return what it printed."""
    written = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    stdout = os.dup(1)  # a command whose output cannot be written gives it up
    try:
        redirected = contextlib.redirect_stdout(written[0]), contextlib.redirect_stderr(written[1])
        with redirected[0], redirected[1], pytest.raises(SystemExit) as ended:
            main()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    texts = [file.buffer.getvalue().decode() for file in written]
    code = ended.value.code
    return Completed(words, 0 if code is None else code, *texts)


@pytest.fixture
def plain_python(tmp_path) -> Callable[..., Completed]:
    """Run ``python ARGS`` in `tmp_path`."""

    def run(*arguments: object) -> Completed:
        return subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )

    return run
