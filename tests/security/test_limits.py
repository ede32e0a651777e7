"""Every limit has one home, and SECURITY.md says them all."""

from __future__ import annotations

from pathlib import Path

from cudatool import limits

ROOT = Path(__file__).parents[2]


def test_the_page_lists_the_limits() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    page = text[text.index("| work | limit |") :].split("\n\n")[0].splitlines()[2:]
    assert [f"| {what} | {limit} |" for what, limit in limits.TABLE] == page


def test_every_limit_is_used_and_listed() -> None:
    code = "".join(
        path.read_text()
        for room in ("cudatool", "cli")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "limits.py"
    )
    own = (ROOT / "cudatool" / "limits.py").read_text()
    table = own[own.index("TABLE: Final") :]
    for name in limits.__all__:
        assert name == "TABLE" or (f"{name}" in code and f"{name}" in table), name
