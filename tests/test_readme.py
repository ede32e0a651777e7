"""What the README shows is what happens."""

from __future__ import annotations

import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from warm_process import COMMAND_LINE, run_python

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
ENVIRONMENT = {"CUDATOOL_DEVICE": "sim", "COLUMNS": "100", "NO_COLOR": "1"}
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with what the README's commands name."""
    made = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "samples", made / "samples", ignore=shutil.ignore_patterns("__pycache__"))
    recording = (ROOT / "tests" / "data" / "streams_default.pickle.xz").read_bytes()
    (made / "gpt.pickle").write_bytes(lzma.decompress(recording))
    (made / "kernels.cu").write_text("__global__ void scale(float *x, float a) { x[threadIdx.x] *= a; }")
    return made


def _run(folder, *arguments, **kwargs):
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **kwargs,
    )


def _without_numbers(text: str) -> str:
    return NUMBER.sub("0", " ".join(text.split()))


def _shows(shown: str, happened: str) -> None:
    """Each line shown must occur, numbers aside: those of another machine's arithmetic differ."""
    flat = _without_numbers(happened)
    for line in filter(str.strip, shown.splitlines()):
        assert _without_numbers(line) in flat, line


def test_commands_do_what_is_shown(folder):
    happened = ""
    for kind, text in BLOCKS:
        if kind == "text":
            _shows(text, happened)
        if kind != "console" or "$ make" in text or "$ pip" in text:
            continue
        happened, shown = "", []
        for line in text.splitlines():
            if not line.startswith("$ cudatool "):
                shown.append(line)
                continue
            words = shlex.split(line)[2:]
            done = run_python(COMMAND_LINE, *words, folder=folder, environment=ENVIRONMENT)
            assert done.returncode == (1 if "pipeline_racy" in line else 0), line + "\n" + done.stderr
            happened += done.stdout + done.stderr
        _shows("\n".join(shown), happened)


def test_python_example_runs(folder):
    (source,) = [text for kind, text in BLOCKS if kind == "python"]
    (folder / "example.py").write_text(source)
    done = _run(folder, sys.executable, "example.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[2. 3. 4.]")
    checked = _run(folder, sys.executable, "-m", "cudatool", "sanitize", "example.py")
    assert checked.returncode == 0, checked.stdout


def test_every_sample_is_in_the_table():
    for path in (ROOT / "samples").glob("[a-z]*.py"):
        assert path.name in README
