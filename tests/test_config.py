"""Every environment variable of cudatool has one home, and the documentation lists them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from house import House

from cudatool import config

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {"CUDATOOL_VERSION"}  # what a file of tuned products says of the cudatool that wrote it


def test_the_page_lists_the_variables() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    page = text[text.index("| variable | default | what it is for |") :].split("\n\n")[0].splitlines()[2:]
    rows = [f"| `{one.name}` | {f'`{one.default}`' if one.default else ''} | {one.meaning} |" for one in config.TABLE]
    assert [" ".join(row.split()) for row in rows] == page


def test_no_variable_is_named_elsewhere() -> None:
    """The marker of child processes is: Python reads that line before it can import anything."""
    named = {
        (module, node.value)
        for module, path in House(ROOT).modules.items()
        if "CUDATOOL_" in (source := path.read_text())  # to parse all takes seconds
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"_?CUDATOOL_\w+", node.value) and node.value not in OTHERS
    }
    assert named
    assert {module for module, _ in named} == {"cudatool.config"}
    marker = (ROOT / "cudatool" / "cudatool_child.pth").read_text()
    assert set(re.findall(r"CUDATOOL_\w+", marker)) == {config.CHILD}


@pytest.mark.parametrize(
    ("text", "given", "value", "is_on"),
    [(None, "", "auto", False), ("", "", "auto", False), ("0", "0", "0", False), ("1", "1", "1", True)],
)
def test_empty_is_as_not_set(
    monkeypatch: pytest.MonkeyPatch, text: str | None, given: str, value: str, is_on: bool
) -> None:
    if text is None:
        monkeypatch.delenv(config.DEVICE.name, raising=False)
    else:
        monkeypatch.setenv(config.DEVICE.name, text)
    assert (given, value, is_on) == (config.DEVICE.given(), config.DEVICE.value(), config.DEVICE.is_on())
