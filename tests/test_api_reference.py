"""docs/api.md says what is there, and everything that is there says what it is."""

from __future__ import annotations

import importlib.util
import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from cudatool.runtime.public_modules import PUBLIC_MODULES

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_api", DOCS / "generate_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_everything_public_has_a_docstring(generator: ModuleType, module: str) -> None:
    found = import_module(module)
    assert inspect.getdoc(found)
    bare = []
    for name, value in generator.members(found):
        if not inspect.getdoc(value):
            bare.append(name)
        if inspect.isclass(value) and value.__module__.startswith("cudatool"):
            bare += [
                f"{name}.{member}"
                for member, function in vars(value).items()
                if not member.startswith("_") and callable(function) and not inspect.getdoc(getattr(value, member))
            ]
    assert [] == bare


def test_a_signature_shows_defaults_as_a_program_writes_them(generator: ModuleType) -> None:
    import cudatool

    assert "(shape, value, dtype=float32, *, device=None) -> DeviceArray" == generator.signature(cudatool.full)
    assert "(device=None, priority=0)" == generator.signature(cudatool.Stream)


def test_a_summary_is_the_first_paragraph_without_links(generator: ModuleType) -> None:
    def function() -> None:
        """Return what :func:`~cudatool.empty` and :class:`this <cudatool.Stream>` are,
        in ``one`` line.

        Not this.
        """

    assert "Return what `cudatool.empty` and `this` are, in `one` line." == generator.summary(function)


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    assert generator.PAGE.read_text() == generator.page(), "run python docs/generate_api.py"
