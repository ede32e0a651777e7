"""The PTX of machine code that compilers of this process make on a GPU: what the code may access is inferred from it.

A program loads machine code into the driver, from which nothing can be inferred. Its compilers know the PTX:

=========================  ==============================================================================
cuda.core, cuda.bindings   :file:`_libnvrtc.c` takes NVRTC's place, forwards each call, and keeps the PTX of the
                           same compilation
CuPy                       calls NVRTC by functions of its own, which are replaced. It keeps machine code in
                           files: it gets a folder of its own, so that what is loaded was compiled under a
                           recording
numba-cuda                 has the PTX of what it links
Triton                     has the PTX that it assembles
=========================  ==============================================================================

The PTX is kept on disk, too, as the compilers keep their results.

Nothing stands in for NVRTC in a program that has imported PyTorch, whose own source reports what it does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from sysconfig import get_config_var
from types import ModuleType
from typing import Any

from cudatool.code_cache import CodeCache
from cudatool.collect import _cupti
from cudatool.collect.replaced import Replaced
from cudatool.errors import ConfigError
from cudatool.loading.after_import import AfterImport
from cudatool.loading.shared_libraries import loaded, open_nvrtc_builtins, wheel_library

__all__ = ["KeptPtx"]

_log = logging.getLogger("cudatool.collect")
_NVRTC = "libnvrtc.so.13"
_STAND_IN = Path(__file__).parents[1] / "sim" / f"_libnvrtc{get_config_var('EXT_SUFFIX')}"
_CUPY_FOLDER = "CUPY_CACHE_DIR"
_Keep = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
_running: KeptPtx | None = None
_library: ctypes.CDLL | None = None  # what stands in for NVRTC: once it does, until the process ends


class KeptPtx:
    """PTX by the digest of the machine code that was made from it, until :meth:`stop`."""

    def __init__(self) -> None:
        self._ptx: dict[int, bytes] = {}
        self._disk = CodeCache("ptx")
        self._replaced = Replaced()
        self._undo: list[Callable[[], object]] = []

    def start(self) -> None:
        """Keep what compilers make from now on."""
        global _running
        _running = self
        self._give_cupy_a_folder()
        self._undo.append(self._replaced.put_back)
        finder = AfterImport(
            {
                "cuda.core": _watch_nvrtc,
                "cuda.bindings.nvrtc": _watch_nvrtc,
                "cupy_backends.cuda.libs.nvrtc": self._watch_cupy,
                "numba.cuda.codegen": self._watch_numba,
                "triton.compiler.compiler": self._watch_triton,
            }
        )
        finder.start()
        self._undo.append(finder.stop)

    def stop(self) -> None:
        """Keep no more. Stopping again changes nothing."""
        global _running
        if _running is self:
            _running = None
        while self._undo:
            self._undo.pop()()

    def keep(self, code: bytes, ptx: bytes) -> None:
        """Note the PTX of machine code."""
        digest = _cupti.digest(code)
        self._ptx[digest] = ptx
        with suppress(ConfigError):  # the setting of the cache's size, which was said elsewhere
            self._disk.put(f"{digest:016x}", ptx)

    def find(self, digest: int) -> bytes | None:
        """Return the PTX of the machine code with this digest, or None."""
        found = self._ptx.get(digest)
        if found is None:
            with suppress(ConfigError):
                found = self._disk.get(f"{digest:016x}")
        return found

    def _give_cupy_a_folder(self) -> None:
        folder = CodeCache("cupy").folder()
        if folder is None:
            return
        before = os.environ.get(_CUPY_FOLDER)
        os.environ[_CUPY_FOLDER] = folder

        def put_back() -> None:
            if before is None:
                os.environ.pop(_CUPY_FOLDER, None)
            else:
                os.environ[_CUPY_FOLDER] = before

        self._undo.append(put_back)

    def _watch_cupy(self, nvrtc: ModuleType) -> None:
        original, ptx_of = getattr(nvrtc, "getCUBIN", None), getattr(nvrtc, "getPTX", None)
        if original is None or ptx_of is None:  # another version: its launches are counted as not checked
            return

        def compiled(program: Any) -> Any:
            code = original(program)
            try:
                ptx = bytes(ptx_of(program)).rstrip(b"\0")
                # CuPy 14 cuts the last byte off, a zero. The driver finds one there: each bytes object ends with it.
                for loaded in (bytes(code), bytes(code) + b"\0"):
                    self.keep(loaded, ptx)
            except Exception:  # it must not reach the program
                _log.debug("the PTX of CuPy's code was not kept", exc_info=True)
            return code

        self._replaced.replace(nvrtc, "getCUBIN", compiled)

    def _watch_numba(self, codegen: ModuleType) -> None:
        library = getattr(codegen, "CUDACodeLibrary", None)
        original = getattr(library, "get_cubin", None)
        if original is None:  # another version: its launches are counted as not checked
            return

        @wraps(original)
        def get_cubin(own: Any, cc: Any = None) -> Any:
            linked = original(own, cc)
            try:
                code = getattr(linked, "code", linked)
                self.keep(bytes(code), own.get_asm_str(cc).encode())
            except Exception:  # it must not reach the program
                _log.debug("the PTX of numba's code was not kept", exc_info=True)
            return linked

        self._replaced.replace(library, "get_cubin", get_cubin)

    def _watch_triton(self, compiler: ModuleType) -> None:
        kernel = getattr(compiler, "CompiledKernel", None)
        if kernel is None:  # another version: its launches are counted as not checked
            return
        original = kernel.__init__

        @wraps(original)
        def init(own: Any, *args: Any, **kwargs: Any) -> None:  # also of what Triton takes from its cache
            original(own, *args, **kwargs)
            try:
                self.keep(own.asm["cubin"], own.asm["ptx"].encode())
            except Exception:  # it must not reach the program
                _log.debug("the PTX of Triton's code was not kept", exc_info=True)

        self._replaced.replace(kernel, "__init__", init)


def _keep(code: int, size: int, ptx: int, ptx_size: int) -> None:
    try:
        if _running is not None:
            _running.keep(ctypes.string_at(code, size), ctypes.string_at(ptx, ptx_size).rstrip(b"\0"))
    except Exception:  # it must not reach the compiler
        _log.exception("the PTX of a compilation was not kept")


_kept = _Keep(_keep)


def _watch_nvrtc(_: ModuleType) -> None:
    """Let our library stand in for NVRTC, unless the program has loaded that already, or has PyTorch."""
    global _library
    real = wheel_library(_NVRTC)
    if _library is not None or "torch" in sys.modules or real is None or not _STAND_IN.exists() or loaded(_NVRTC):
        return
    open_nvrtc_builtins(real)
    library = ctypes.CDLL(os.fspath(_STAND_IN), mode=ctypes.RTLD_GLOBAL)
    library.cudatool_nvrtc_path(os.fsencode(real))
    library.cudatool_nvrtc_keep(ctypes.cast(_kept, ctypes.c_void_p))
    _library = library
