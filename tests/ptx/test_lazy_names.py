"""The names of :mod:`cudatool.ptx`, whose modules are loaded when they are used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from cudatool import ptx

IMPORTED = {
    alias.name: str(node.module)
    for node in ast.walk(ast.parse(inspect.getsource(ptx)))
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("cudatool.ptx.")
    for alias in node.names
}


def test_type_checkers_see_the_same_names() -> None:
    assert set(ptx.__all__) == IMPORTED.keys()


@pytest.mark.parametrize("name", ptx.__all__)
def test_a_name_is_the_one_that_type_checkers_see(name: str) -> None:
    assert getattr(ptx, name) is getattr(import_module(IMPORTED[name]), name)


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ptx.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("program", "parses"),
    [
        ("ptx.join([b'a', b'b'])", False),
        ("ptx.is_container(b'')", False),
        ("ptx.PtxError('wrong')", False),
        ("ptx.parse_image(b'.version 8.0')", True),
    ],
)
def test_the_parser_is_loaded_for_what_needs_it(program: str, parses: bool) -> None:
    code = f"import sys; from cudatool import ptx; {program}; print('cudatool.ptx.model' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"{parses}\n" == done.stdout


def test_access_inference_is_not_loaded_for_what_translates_a_kernel() -> None:
    code = (
        "import sys; from cudatool.sim.jit import declarations, translator; "
        "print({'cudatool.ptx.access', 'cudatool.ptx.model'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "{'cudatool.ptx.model'}\n" == done.stdout
