"""NVIDIA's libraries are found wherever its wheels lie, and what is loaded is known without loading it."""

from __future__ import annotations

import ctypes
import importlib
import shutil
import sys

import pytest

from cudatool.collect import _unpickle
from cudatool.loading import shared_libraries


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
    """Two folders of packages that wheels of NVIDIA's are installed into, and no others."""
    folders = [tmp_path / name / "nvidia" for name in ("first", "second")]
    for folder in folders:
        (folder / "cu13" / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(folder.parent) for folder in folders])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    importlib.invalidate_caches()
    return folders


def test_a_library_is_found_in_whichever_folder_its_wheel_was_installed(nvidia):
    assert nvidia == shared_libraries.wheel_folders()
    assert shared_libraries.wheel_library("libnvrtc.so.13") is None
    library = nvidia[1] / "cu13" / "lib" / "libnvrtc.so.13"
    library.touch()
    assert library == shared_libraries.wheel_library("libnvrtc.so.13")


def test_without_a_wheel_of_nvidias_nothing_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert [] == shared_libraries.wheel_folders()
    assert shared_libraries.wheel_library("libnvrtc.so.13") is None


def test_asking_whether_a_library_is_loaded_does_not_load_it(tmp_path):
    library = str(shutil.copy(_unpickle.__file__, tmp_path / "lib_of_nobody.so"))
    for _ in range(2):
        assert shared_libraries.loaded(library) is None
    ctypes.CDLL(library)
    assert shared_libraries.loaded(library) is not None
