"""Building what watches PyTorch: whatever goes wrong is one error, which never reaches the program's import."""

from __future__ import annotations

import os
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cudatool.collect import torch_build
from cudatool.collect.torch_build import TorchBuildError, load


@pytest.fixture
def torch() -> ModuleType:
    found = ModuleType("torch")
    found.__version__ = "0.1"
    found.__file__ = __file__
    found.version = SimpleNamespace(git_version="abc", cuda=None)
    return found


def test_a_compiler_that_writes_nothing_is_a_build_error(
    torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(torch_build, "_options", lambda torch: [])
    monkeypatch.setattr(torch_build, "_libraries", lambda torch: [])
    with pytest.raises(TorchBuildError, match=r"0\.1 cannot be built: .*torch_log\.so"):
        load(torch)


_MODULE = """
#include <Python.h>
static int fill(PyObject *module) { return PyModule_AddIntConstant(module, "value", 42); }
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "torch_log", NULL, 0, NULL, slots};
PyMODINIT_FUNC PyInit_torch_log(void) { return PyModuleDef_Init(&definition); }
"""


@pytest.mark.parametrize("kept", [True, False])
def test_the_module_is_built_once_where_it_can_be_kept(
    torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path / ("cache" if kept else "file")))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "torch_log.cpp").write_text(_MODULE)
    monkeypatch.setattr(torch_build, "_FOLDER", tmp_path)
    monkeypatch.setattr(torch_build, "_libraries", lambda torch: [])
    monkeypatch.setattr(
        torch_build, "_options", lambda torch: ["-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
    )
    assert 42 == load(torch).value
    load.cache_clear()
    monkeypatch.setattr(torch_build, "_options", lambda torch: ["--no-such-option"])  # another build would fail
    if kept:
        assert 42 == load(torch).value
    else:
        with pytest.raises(TorchBuildError, match="no-such-option"):
            load(torch)


def _value(folder: str) -> int:
    torch = ModuleType("torch")
    torch.__version__ = "0.1"
    torch.version = SimpleNamespace(git_version="abc", cuda=None)
    os.environ |= {"CUDATOOL_CACHE_DIR": f"{folder}/cache", "CXX": f"{folder}/compiler"}
    torch_build._FOLDER = Path(folder)
    torch_build._libraries = lambda torch: []
    torch_build._options = lambda torch: ["-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
    return load(torch).value


def test_of_processes_that_need_the_module_at_once_one_builds_it(tmp_path: Path) -> None:
    (tmp_path / "torch_log.cpp").write_text(_MODULE)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho built >> {tmp_path}/log\nsleep 0.3\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        assert [42] * 4 == list(pool.map(_value, [str(tmp_path)] * 4))
    assert "built\n" == (tmp_path / "log").read_text()


def test_a_module_that_cannot_be_loaded_is_a_build_error(
    torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build, "_built", lambda torch, name: b"not a library")
    with pytest.raises(TorchBuildError, match=r"0\.1 cannot be built: "):
        load(torch)
