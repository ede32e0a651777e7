"""A library that was built with NVTX, as far as a tool can tell: tables of functions that the tool puts its own into."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from cudatool.collect import _nvtx

_CORE, _CORE2, _CALLBACKS, _MOST = 1, 5, 1, 16
ASCII, UNICODE, REGISTERED = 1, 2, 3


class Attributes(ctypes.Structure):
    _fields_ = [
        ("version", c_uint16),
        ("size", c_uint16),
        ("category", c_uint32),
        ("color_type", c_int32),
        ("color", c_uint32),
        ("payload_type", c_int32),
        ("reserved", c_int32),
        ("payload", c_uint64),
        ("message_type", c_int32),
        ("message", c_void_p),
    ]


class _Callbacks(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("table_of", CFUNCTYPE(c_int, c_int, POINTER(c_void_p), POINTER(c_uint32))),
    ]


class Nvtx:
    """NVTX's functions, as a library's own copy has them once it has loaded the tool."""

    def __init__(self) -> None:
        self._slots = {module: (c_void_p * _MOST)() for module in (_CORE, _CORE2)}
        self._tables = {
            module: (c_void_p * _MOST)(*(ctypes.addressof(slots) + 8 * i for i in range(_MOST)))
            for module, slots in self._slots.items()
        }
        table_of = _Callbacks._fields_[1][1](self._table_of)
        self._callbacks = _Callbacks(ctypes.sizeof(_Callbacks), table_of)
        export = CFUNCTYPE(c_void_p, c_uint32)(
            lambda table: ctypes.addressof(self._callbacks) if table == _CALLBACKS else None
        )
        assert 1 == ctypes.CDLL(_nvtx.__file__).InitializeInjectionNvtx2(export)
        text, wide, event, domain = c_char_p, ctypes.c_wchar_p, POINTER(Attributes), c_void_p
        self.mark = self._function(_CORE, 2, None, text)
        self.start = self._function(_CORE, 5, c_uint64, text)
        self.end = self._function(_CORE, 7, None, c_uint64)
        self.push_with = self._function(_CORE, 8, c_int, event)
        self.push = self._function(_CORE, 9, c_int, text)
        self.push_wide = self._function(_CORE, 10, c_int, wide)
        self.pop = self._function(_CORE, 11, c_int)
        self.domain_push = self._function(_CORE2, 4, c_int, domain, event)
        self.domain_pop = self._function(_CORE2, 5, c_int, domain)
        self.register = self._function(_CORE2, 10, c_void_p, domain, text)
        self.create = self._function(_CORE2, 12, c_void_p, text)

    def _table_of(self, module: int, table: Any, count: Any) -> int:
        if module not in self._tables:
            return 0
        table[0], count[0] = ctypes.addressof(self._tables[module]), _MOST
        return 1

    def _function(self, module: int, number: int, result: Any, *arguments: Any) -> Any:
        address = self._slots[module][number]
        assert address, f"the tool left function {number} of module {module} out"
        return CFUNCTYPE(result, *arguments)(address)


def event(text: str, *, registered: int = 0) -> Any:
    """Return the attributes of a range."""
    found = Attributes(version=3, size=ctypes.sizeof(Attributes))
    if registered:
        found.message_type, found.message = REGISTERED, registered
    else:
        kept = ctypes.create_string_buffer(text.encode())
        found.message_type, found.message, found.kept = ASCII, ctypes.addressof(kept), kept
    return ctypes.byref(found)
