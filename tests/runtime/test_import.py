"""What ``import cudatool`` gives, and what it does not load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import cudatool


def test_import_loads_nothing_heavy() -> None:
    heavy = {"cuda", "inspect", "llvmlite", "numpy", "pynvml"}
    program = f"import sys; before = {{*sys.modules}}; import cudatool; print(*{heavy} & {{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert done.stderr == ""


def test_the_software_device_starts_without_numpy() -> None:
    """Programs in C++ do not need it, and it takes as long to load as the device."""
    program = (
        "import sys; from cudatool import _driver; _driver.initialize(); from cudatool.sim import jit;"
        "print(*{'numpy', 'cuda', 'cudatool.trace'} & {*sys.modules}); jit.Shadow; print('numpy' in sys.modules)"
    )
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "True"]


def test_kernels_from_the_cache_need_no_translator() -> None:
    program = (
        "import sys; from cudatool.sim import jit; from cudatool.sim.jit.collective import SUSPENSIONS; "
        "translator = 'cudatool.sim.jit.codegen'; print(translator in sys.modules, len(SUSPENSIONS)); "
        "__import__(translator); print(len(SUSPENSIONS))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded, known, all_rows = done.stdout.split()
    assert ("False", all_rows) == (loaded, known)


@pytest.mark.parametrize("name", cudatool.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(cudatool, name) is not None
    assert name in dir(cudatool)


def test_packages_are_loaded_when_they_are_looked_at() -> None:
    program = (
        "import sys, cudatool; from cudatool.runtime.public_modules import PUBLIC_MODULES as names\n"
        "assert not set(names[1:]) & set(sys.modules)\n"
        "for name in names[1:]: assert getattr(cudatool, name.partition('.')[2]).__name__ == name"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = cudatool.no_such_name  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(cudatool))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    names = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == sorted(cudatool.__all__)


def test_device_is_chosen_at_first_use() -> None:
    program = (
        "import os, cudatool; from cudatool import _driver; assert not cudatool.is_initialized();"
        "os.environ['CUDATOOL_DEVICE'] = 'sim:memory=64MiB'; print(cudatool.mem_get_info()[1] >> 20);"
        "assert cudatool.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64"]


def test_device_that_is_not_there_is_not_available() -> None:
    program = (
        "import os; os.environ.update(CUDATOOL_DEVICE='cuda', CUDA_VISIBLE_DEVICES=''); import cudatool;"
        "print(cudatool.is_available(), cudatool.device_count())\n"
        "try: cudatool.empty(1)\n"
        "except cudatool.CudatoolError as error: print(type(error).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "0", "DeviceUnavailableError"]
