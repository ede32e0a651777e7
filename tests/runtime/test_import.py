"""What ``import cudatool`` gives, and what it does not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_kernels_from_the_cache_need_no_translator(tmp_path: Path) -> None:
    """Nor LLVM, and their PTX is not parsed."""
    program = """
import ctypes, sys
from cudatool.code_cache import CodeCache
from cudatool.sim import jit
text = b'''.version 8.0
.target sm_90
.address_size 64
.global .u32 limit = 42;
.visible .entry f(.param .u64 p) {
    .reg .b32 %x; .reg .b64 %a;
    ld.param.u64 %a, [p];
    ld.global.u32 %x, [limit];
    st.global.u32 [%a], %x;
    ret;
}'''
module = jit.load(text, cache=CodeCache("native"))
limit, out = ctypes.c_uint32.from_buffer_copy(module.globals["limit"].initial), ctypes.c_uint32()
module.bind({"limit": ctypes.addressof(limit)})
arguments = ctypes.c_uint64(ctypes.addressof(out))
shape = jit.LaunchShape((1, 1, 1), (1, 1, 1))
for optimized in (False, True):
    module.kernels["f"].launch(shape, ctypes.addressof(arguments), jit.LaunchOptions(optimized=optimized))
    print(out.value)
    limit.value += 1
print(*{"cudatool.ptx.model", "cudatool.sim.jit.codegen", "llvmlite.binding"} & {*sys.modules})
"""
    environment = {**os.environ, "CUDATOOL_CACHE_DIR": str(tmp_path)}
    for loaded, is_damaged in ((3, False), (0, False), (3, True)):
        for file in (tmp_path / "native").iterdir() if is_damaged else ():
            file.write_bytes(file.read_bytes()[:-1])
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        words = done.stdout.split()
        assert (["42", "43"], loaded) == (words[:2], len(words) - 2), done.stderr


def test_every_suspension_is_known_where_an_ending_is_explained() -> None:
    program = (
        "import sys; from cudatool.sim.jit import endings; from cudatool.sim.jit.collective import SUSPENSIONS; "
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
