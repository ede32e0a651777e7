"""What is done when a program has imported a module never fails that import."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest

from cudatool.loading.after_import import AfterImport


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_failure_is_logged_and_does_not_reach_the_import(tmp_path, monkeypatch, caplog, imported_before):
    (tmp_path / "watched_one.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watched_one", raising=False)

    def fails(module):
        raise AttributeError(f"this version of {module.__name__} has no such class")

    finder = AfterImport({"watched_one": fails})
    if imported_before:
        importlib.import_module("watched_one")
    with caplog.at_level(logging.ERROR, "cudatool"):
        finder.start()
        assert 7 == importlib.import_module("watched_one").value
    finder.stop()
    monkeypatch.delitem(sys.modules, "watched_one")
    (record,) = caplog.records
    assert "watched_one" in record.getMessage() and record.exc_info


def test_several_modules_are_each_waited_for_once_until_the_end(tmp_path, monkeypatch):
    """One of them imported before, one imported by the function of another, one never, one too late."""
    names = ["watched_before", "watched_inner", "watched_later", "watched_never", "watched_late"]
    for name in names:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    called = []

    def then(module):
        called.append(module.__name__)
        if module.__name__ == "watched_before":
            importlib.import_module("watched_inner")

    finder = AfterImport(dict.fromkeys(names, then))
    importlib.import_module("watched_before")
    path = list(sys.meta_path)
    finder.start()
    for _ in range(2):
        importlib.import_module("watched_later")
    assert ["watched_before", "watched_inner", "watched_later"] == called
    assert finder in sys.meta_path
    finder.stop()
    importlib.import_module("watched_late")
    assert ["watched_before", "watched_inner", "watched_later"] == called
    finder.start()
    assert 7 == len(called)
    finder.stop()
    assert path == sys.meta_path
    for name in names:
        sys.modules.pop(name, None)


def test_one_that_has_found_all_its_modules_is_in_the_way_of_no_other_import(tmp_path, monkeypatch):
    (tmp_path / "watched_two.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    path = list(sys.meta_path)
    AfterImport({"sys": lambda _: None, "watched_two": lambda _: None}).start()
    assert path != sys.meta_path
    importlib.import_module("watched_two")
    monkeypatch.delitem(sys.modules, "watched_two")
    assert path == sys.meta_path
