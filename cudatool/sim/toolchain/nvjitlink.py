"""nvJitLink as programs on the software device see it: what they link stays PTX.

The real nvJitLink is asked for everything first. It needs no GPU, so options, errors and logs are its own. What differs
is the machine code that a link ends in: :func:`cudatool.ptx.join` of the inputs' PTX takes its place. LTO-IR becomes
PTX in a second link by the real library, with ``-ptx``; fatbins, object files and archives give the PTX in them.
Machine code without PTX makes the link fail, except in archives, from which a link takes only what it needs.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_uint32, c_void_p
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from cudatool import ptx
from cudatool.loading.late_dataclasses import dataclass, field
from cudatool.ptx.errors import PtxError
from cudatool.sim import signals
from cudatool.sim.abi import logger

__all__ = ["InputType", "install"]

_SUCCESS, _INVALID_INPUT, _INTERNAL = 0, 3, 6


class InputType(IntEnum):
    """nvJitLinkInputType."""

    CUBIN = 1
    PTX = 2
    LTOIR = 3
    FATBIN = 4
    OBJECT = 5
    LIBRARY = 6
    ANY = 10


@dataclass()
class _Link:
    """What a handle of nvJitLink has been given."""

    options: list[bytes]
    ltoir: list[tuple[int, bytes, bytes | None]] = field(default_factory=list)
    ptx: list[bytes] = field(default_factory=list)
    machine_code: list[bytes] = field(default_factory=list)  # names of archives that have some
    image: bytes = b""
    error: bytes = b""

    @property
    def is_lto(self) -> bool:
        return b"-lto" in self.options or b"-dlto" in self.options

    @property
    def arch(self) -> int:
        """Compute capability to link for, times ten."""
        for option in self.options:
            if option.startswith(b"-arch="):
                return int(b"".join(bytes([c]) for c in option if c in b"0123456789"))
        return 0

    def take(self, real: _Real, handle: int, kind: int, data: bytes, name: bytes | None) -> int:
        """Give an input to the real nvJitLink, and keep what its PTX can be had from."""
        if (
            not ptx.is_container(data)
            and kind in (InputType.CUBIN, InputType.PTX, InputType.ANY)
            and b".version" in data
        ):
            for text in ptx.split(data):  # our NVRTC and this linker hand out PTX as machine code
                status = real.add(handle, InputType.PTX, text + b"\0", name)
                if status:
                    return status
            self.ptx.append(data)
            return _SUCCESS
        status = real.add(handle, kind, data, name)
        if status == _SUCCESS:
            if ptx.is_container(data):
                self._unpack(kind, data, name)
            elif kind in (InputType.LTOIR, InputType.ANY):
                self.ltoir.append((kind, data, name))
        return status

    def _unpack(self, kind: int, data: bytes, name: bytes | None) -> None:
        try:
            codes = ptx.device_code(data)
            if self.is_lto and any(code.kind == "ltoir" for code in codes):
                self.ltoir.append((kind, data, name))
                return
            texts = ptx.ptx_for(data, self.arch)
        except PtxError as error:
            self.error = b"ERROR: %s: %s\n" % (name or b"?", str(error).encode())
            return
        if not texts and kind != InputType.LIBRARY:
            self.error = b"ERROR: %s: machine code without PTX, which the software device cannot run\n" % (name or b"?")
        elif not texts:
            self.machine_code.append(name or b"?")
        self.ptx += texts

    def finish(self, real: _Real, handle: int) -> int:
        """Make the image, once the real nvJitLink has found nothing wrong."""
        if not self.error:
            try:
                return self._finish(real, handle)
            except (OSError, PtxError) as error:
                self.error = b"ERROR: %s\n" % str(error).encode()
        return _INVALID_INPUT

    def _finish(self, real: _Real, handle: int) -> int:
        texts = list(self.ptx)
        if self.ltoir:
            inputs = list(self.ltoir)
            called = self._called_by_ptx()
            if called:
                inputs.append((InputType.LTOIR, _ltoir(_user_of(called), self.arch), b"cudatool"))
            status, text, log_text = real.to_ptx([*self.options, b"-ptx"], inputs)
            if status:
                self.error = log_text
                return status
            texts.insert(0, _without_user(text, called))
        image = ptx.join(texts, ptx.register_counts(real.data(handle, "LinkedCubin")))
        if self.machine_code:
            # The functions of libcudadevrt (cuda...) are the device's own, others would be missing.
            missing = [name for name in ptx.undefined(ptx.parse_image(image)) if not name.startswith("cuda")]
            if missing:
                where = b", ".join(self.machine_code).decode("utf-8", "replace")
                raise PtxError(f"{where}: machine code without PTX, needed for {', '.join(missing)}")
        self.image = image + b"\0"
        return _SUCCESS

    def _called_by_ptx(self) -> list[str]:
        """Return the functions that PTX needs from LTO-IR. LTO-IR alone does not show that they are used."""
        if not self.ptx:
            return []
        module = ptx.parse_image(ptx.join(self.ptx))
        return [name for name in ptx.undefined(module) if name in module.functions and not name.startswith("cuda")]


class _Real:
    """What this module calls of the real nvJitLink."""

    def __init__(self, stand_in: ctypes.CDLL) -> None:
        stand_in.cudatool_nvjitlink_real.restype = c_void_p
        stand_in.cudatool_nvjitlink_real.argtypes = [c_char_p]

        def function(name: str, *types: Any) -> Callable[..., int]:
            address = stand_in.cudatool_nvjitlink_real(name.encode())
            if not address:
                raise OSError(f"nvJitLink cannot be loaded: it has no {name}")
            return ctypes.CFUNCTYPE(c_int, *types)(address)

        self.create = function("nvJitLinkCreate", c_void_p, c_uint32, c_void_p)
        self.destroy = function("nvJitLinkDestroy", c_void_p)
        self.add_data = function("nvJitLinkAddData", c_void_p, c_int, c_char_p, c_size_t, c_char_p)
        self.complete = function("nvJitLinkComplete", c_void_p)
        results = ("LinkedCubin", "LinkedPtx", "ErrorLog")
        self.sizes = {what: function(f"nvJitLinkGet{what}Size", c_void_p, c_void_p) for what in results}
        self.getters = {what: function(f"nvJitLinkGet{what}", c_void_p, c_void_p) for what in results}

    def add(self, handle: int, kind: int, data: bytes, name: bytes | None) -> int:
        return self.add_data(handle, kind, data, len(data), name)

    def data(self, handle: int, what: str) -> bytes:
        """Return ``LinkedCubin``, ``LinkedPtx`` or ``ErrorLog``."""
        size = c_size_t()
        self.sizes[what](handle, ctypes.addressof(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.getters[what](handle, ctypes.addressof(buffer))
        return buffer.raw

    def text(self, handle: int, what: str) -> bytes:
        """Return the same without the terminating NUL."""
        return self.data(handle, what).rstrip(b"\0")

    def to_ptx(self, options: list[bytes], inputs: list[tuple[int, bytes, bytes | None]]) -> tuple[int, bytes, bytes]:
        """Link LTO-IR to PTX. Returns status, text and error log."""
        handle = c_void_p()
        array = (c_char_p * len(options))(*options)
        status = self.create(ctypes.addressof(handle), len(options), ctypes.addressof(array))
        if status or not handle.value:
            return status or _INTERNAL, b"", b""
        try:
            for kind, data, name in inputs:
                status = status or self.add(handle.value, kind, data, name)
            status = status or self.complete(handle.value)
            text = b"" if status else self.text(handle.value, "LinkedPtx")
            return status, text, self.text(handle.value, "ErrorLog")
        finally:
            self.destroy(ctypes.addressof(handle))


_USER = "cudatool_uses_what_ptx_calls"


def _user_of(names: list[str]) -> str:
    """Return CUDA C++ with a kernel that refers to functions of these names."""
    declarations = "".join(f'extern "C" __device__ void {name}();\n' for name in names)
    uses = "".join(f"p[{index}] = (void *)&{name};" for index, name in enumerate(names))
    return f'{declarations}extern "C" __global__ void {_USER}(void **p) {{ {uses} }}\n'


def _without_user(text: bytes, names: list[str]) -> bytes:
    """Return linked PTX without that kernel, and with the functions visible to other modules."""
    if not names:
        return text
    text = re.sub(rb"\.visible \.entry %s\(.*?\n}\n" % _USER.encode(), b"", text, flags=re.DOTALL)
    for name in names:
        pattern = rb"^\.func(?=\s*(?:\([^)]*\)\s*)?%s\s*[(\n])" % re.escape(name.encode())
        text = re.sub(pattern, b".visible .func", text, flags=re.MULTILINE)
    return text


def _ltoir(source: str, arch: int) -> bytes:
    """Compile CUDA C++ to LTO-IR with NVRTC, whose stand-in is loaded.

    Raises
    ------
    OSError
        NVRTC is not there, or fails.
    """
    nvrtc = ctypes.CDLL(None)
    if not hasattr(nvrtc, "nvrtcCreateProgram"):
        raise OSError("PTX that calls functions in LTO-IR needs NVRTC")
    program, size = c_void_p(), c_size_t()
    options = (c_char_p * 3)(b"-arch=sm_%d" % arch, b"-dlto", b"-rdc=true")

    def check(status: int) -> None:
        if status:
            raise OSError(f"NVRTC error {status}")

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"cudatool", 0, None, None))
    try:
        check(nvrtc.nvrtcCompileProgram(program, len(options), options))
        check(nvrtc.nvrtcGetLTOIRSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetLTOIR(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class _Hooks:
    """What the stand-in library calls instead of the real one's functions of the same names."""

    def __init__(self, stand_in: ctypes.CDLL) -> None:
        self._stand_in = stand_in
        self._links: dict[int, _Link] = {}

    @cached_property
    def _real(self) -> _Real:
        return _Real(self._stand_in)

    def create(self, handle: int, count: int, options: int) -> int:
        status = self._real.create(handle, count, options)
        if status == _SUCCESS:
            given = [option or b"" for option in (c_char_p * count).from_address(options)] if count else []
            self._links[c_size_t.from_address(handle).value] = _Link(given)
        return status

    def destroy(self, handle: int) -> int:
        if handle:
            self._links.pop(c_size_t.from_address(handle).value, None)
        return self._real.destroy(handle)

    def add_data(self, handle: int, kind: int, data: int, size: int, name: bytes | None) -> int:
        link = self._links.get(handle)
        if link is None or not data:
            return self._real.add_data(handle, kind, None, size, name)
        return link.take(self._real, handle, kind, ctypes.string_at(data, size), name)

    def add_file(self, handle: int, kind: int, name: bytes | None) -> int:
        try:
            data = Path(os.fsdecode(name or b"")).read_bytes()
        except OSError:
            return _INVALID_INPUT
        link = self._links.get(handle)
        return _INVALID_INPUT if link is None else link.take(self._real, handle, kind, data, name)

    def complete(self, handle: int) -> int:
        link = self._links.get(handle)
        status = self._real.complete(handle)
        return status if status or link is None or b"-ptx" in link.options else link.finish(self._real, handle)

    def image_size(self, handle: int, size: int) -> int:
        link = self._links.get(handle)
        if link is None or not link.image:
            return _INTERNAL
        c_size_t.from_address(size).value = len(link.image)
        return _SUCCESS

    def image(self, handle: int, to: int) -> int:
        link = self._links.get(handle)
        if link is None or not link.image:
            return _INTERNAL
        ctypes.memmove(to, link.image, len(link.image))
        return _SUCCESS

    def _error_log(self, handle: int) -> bytes:
        link = self._links.get(handle)
        return self._real.text(handle, "ErrorLog") + (link.error if link else b"") + b"\0"

    def error_size(self, handle: int, size: int) -> int:
        c_size_t.from_address(size).value = len(self._error_log(handle))
        return _SUCCESS

    def error_text(self, handle: int, to: int) -> int:
        text = self._error_log(handle)
        ctypes.memmove(to, text, len(text))
        return _SUCCESS


def install(stand_in: ctypes.CDLL) -> None:
    """Hook the functions of the stand-in library, which knows where the real one is."""
    hooks = _Hooks(stand_in)
    word = c_size_t
    for name, function, types in (
        ("nvJitLinkCreate", hooks.create, (word, c_uint32, word)),
        ("nvJitLinkDestroy", hooks.destroy, (word,)),
        ("nvJitLinkAddData", hooks.add_data, (word, c_int, word, c_size_t, c_char_p)),
        ("nvJitLinkAddFile", hooks.add_file, (word, c_int, c_char_p)),
        ("nvJitLinkComplete", hooks.complete, (word,)),
        ("nvJitLinkGetLinkedCubinSize", hooks.image_size, (word, word)),
        ("nvJitLinkGetLinkedCubin", hooks.image, (word, word)),
        ("nvJitLinkGetErrorLogSize", hooks.error_size, (word, word)),
        ("nvJitLinkGetErrorLog", hooks.error_text, (word, word)),
    ):
        hook = ctypes.CFUNCTYPE(c_int, *types)(_caught(function))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(hook))  # C may call it until the process ends
        stand_in.cudatool_nvjitlink_hook(name.encode(), hook)
    ctypes.pythonapi.Py_AtExit(stand_in.cudatool_nvjitlink_close)


def _caught(function: Callable[..., int]) -> Callable[..., int]:
    """Return `function` with exceptions turned into a status, as they must not cross into C."""

    def call(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except Exception:
            logger().exception("%s failed", function.__name__)
            return _INTERNAL

    signals.keep_out_of(call)
    return call
