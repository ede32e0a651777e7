"""Builds :file:`torch_log.cpp` or :file:`torch_blocks.cpp` against the PyTorch that the program imports.

That is done once for each version of the two.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from cudatool.code_cache import CodeCache
from cudatool.errors import ConfigError, CudatoolError
from cudatool.loading.shared_libraries import wheel_folders

__all__ = ["TorchBuildError", "load"]

_FOLDER = Path(__file__).parent
_KEPT = CodeCache("torch")


class TorchBuildError(CudatoolError):
    """The part that watches PyTorch could not be built."""


@functools.cache
def load(torch: ModuleType, name: str = "torch_log") -> ModuleType:
    """Return the extension module `name` for this `torch`, built now (some seconds) if no earlier process has kept it.

    Raises
    ------
    TorchBuildError
        There is no C++ compiler (``CXX``, else ``g++`` or ``c++``), or it failed: the message has its first lines. Or
        the module cannot be loaded.
    """
    try:
        return _loaded(_built(torch, name), name)
    except (ImportError, OSError, ConfigError) as error:  # which must not reach the program's `import torch`
        raise TorchBuildError(f"the part that watches PyTorch {torch.__version__} cannot be built: {error}") from error


def _loaded(library: bytes, name: str) -> ModuleType:
    """Load the module from memory: a file could be changed before it is loaded.

    The memory file stays open: the dynamic loader identifies a library by its path, which must not be reused.
    """
    memory = os.memfd_create(f"{name}.so")
    with open(memory, "wb", closefd=False) as file:
        file.write(library)
    path = f"/proc/self/fd/{memory}"
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _built(torch: ModuleType, name: str) -> bytes:
    path = _FOLDER / f"{name}.cpp"
    sources = [part.read_bytes() for part in (path, *sorted(_FOLDER.glob("*.h")))]
    facts = (sources, torch.__version__, torch.version.git_version, sys.implementation.cache_tag, os.uname().machine)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    kept = _KEPT.get(key)
    if kept is None:
        with _KEPT.alone():
            kept = _KEPT.get(key)
            if kept is None:
                kept = _compiled(torch, path)
                _KEPT.put(key, kept)
    return kept


def _compiled(torch: ModuleType, path: Path) -> bytes:
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise TorchBuildError("watching PyTorch needs a C++ compiler: install g++, or name one in CXX")
    print("cudatool: building the part that watches PyTorch, once for this version of it", file=sys.stderr)  # noqa: T201
    with tempfile.TemporaryDirectory(prefix="cudatool-") as folder:
        made = Path(folder) / f"{path.stem}.so"
        done = subprocess.run(
            [compiler, *_options(torch), str(path), "-o", str(made), *_libraries(torch)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = "\n".join(line for line in done.stderr.splitlines() if "error" in line)[:2000]
            raise TorchBuildError(f"the part that watches PyTorch {torch.__version__} cannot be built: {said}")
        return made.read_bytes()


def _options(torch: ModuleType) -> list[str]:
    root = Path(torch.__file__ or "").parent
    # NDEBUG as PyTorch itself was built: layouts depend on it.
    options = ["-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-w"]
    options.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    includes = [Path(sysconfig.get_path("include")), root / "include"]
    if torch.version.cuda:
        options.append("-DWITH_CUDA")
        includes += _cuda_includes()
    return [*options, *(word for path in includes for word in ("-isystem", str(path)))]


def _cuda_includes() -> list[Path]:
    """Folders with the CUDA runtime's headers: NVIDIA's wheels (of which cudatool needs one), then a toolkit."""
    folders = [wheel / name / "include" for wheel in wheel_folders() for name in ("cu13", "cuda_runtime")]
    folders.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include")
    return [folder for folder in folders if (folder / "cuda_runtime_api.h").exists()]


def _libraries(torch: ModuleType) -> list[str]:
    folder = Path(torch.__file__ or "").parent / "lib"
    names = ["torch_python", "torch_cpu", "c10"] + (["c10_cuda"] if torch.version.cuda else [])
    return [f"-L{folder}", *(f"-l{name}" for name in names), f"-Wl,-rpath,{folder}"]
