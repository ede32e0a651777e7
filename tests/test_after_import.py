"""What is done when a program has imported a module never fails that import."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest

from cudatool.after_import import AfterImport


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_failure_is_logged_and_does_not_reach_the_import(tmp_path, monkeypatch, caplog, imported_before):
    (tmp_path / "watched_one.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watched_one", raising=False)

    def fails(module):
        raise AttributeError(f"this version of {module.__name__} has no such class")

    finder = AfterImport("watched_one", fails)
    if imported_before:
        importlib.import_module("watched_one")
    with caplog.at_level(logging.ERROR, "cudatool"):
        finder.start()
        assert 7 == importlib.import_module("watched_one").value
    finder.stop()
    monkeypatch.delitem(sys.modules, "watched_one")
    (record,) = caplog.records
    assert "watched_one" in record.getMessage() and record.exc_info
