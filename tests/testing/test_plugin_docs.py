"""docs/pytest.md says what happens."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from warm_process import PLAIN_PYTEST

pytest_plugins = "pytester"

PAGE = (Path(__file__).parents[2] / "docs" / "pytest.md").read_text()


def test_first_example(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
    monkeypatch.setenv("COLUMNS", "78")
    (suite,) = re.findall(r"```python\n# test_pipeline.py\n(.*?)```", PAGE, re.DOTALL)
    (command, output) = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)[0]
    (pytester.path / "test_pipeline.py").write_text("# test_pipeline.py\n" + suite)
    result = pytester.runpytest_subprocess(*PLAIN_PYTEST, *command.split()[1:])
    parts = output.split("...\n")
    assert 4 == len(parts)
    assert [] == [part for part in parts if part not in result.stdout.str() + "\n"]
    plain = pytester.runpytest_subprocess(*PLAIN_PYTEST, "test_pipeline.py")
    plain.assert_outcomes(passed=1)


def test_every_option_and_marker_is_named(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_subprocess(*PLAIN_PYTEST, "--help").stdout.str()
    markers = pytester.runpytest_subprocess(*PLAIN_PYTEST, "--markers").stdout.str()
    options = set(re.findall(r"^  (--cudatool[a-z-]*)", text, re.MULTILINE))
    assert len(options) == 9
    assert [] == [option for option in options if f"`{option}" not in PAGE]
    ours = re.findall(r"^@pytest\.mark\.(\w*cuda\w*)", markers, re.MULTILINE)
    assert {"cuda_sanitize", "limit_cuda_memory", "limit_cuda_leaks"} == set(ours)
    assert [] == [marker for marker in ours if f"@pytest.mark.{marker}" not in PAGE]
