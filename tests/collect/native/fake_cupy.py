"""Stands in for CuPy: its memory hooks and its pool, as cupy/cuda/memory.pyx and memory_hook.pyx of CuPy 14 have them.

The pool behaves as there in what its hooks see: one arena for each stream, best fit, splitting, merging of neighbours.
The driver's memory comes from a function of the test's.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import OrderedDict
from types import ModuleType
from typing import Any

_UNIT = 512


def install(driver: Any) -> Any:
    """Put modules ``cupy`` and ``cupy.cuda`` into place; return the latter. `driver` has malloc(size) and free(address)."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    local = threading.local()

    def get_memory_hooks() -> OrderedDict[str, Any]:
        if not hasattr(local, "memory_hooks"):
            local.memory_hooks = OrderedDict()
        return local.memory_hooks

    class MemoryHook:
        name = "MemoryHook"

        def __enter__(self):
            hooks = get_memory_hooks()
            if self.name in hooks:
                raise KeyError(f"memory hook {self.name} already exists")
            hooks[self.name] = self
            return self

        def __exit__(self, *_):
            del get_memory_hooks()[self.name]

        def alloc_preprocess(self, **kwargs): ...
        def alloc_postprocess(self, **kwargs): ...
        def malloc_preprocess(self, **kwargs): ...
        def malloc_postprocess(self, **kwargs): ...
        def free_preprocess(self, **kwargs): ...
        def free_postprocess(self, **kwargs): ...

    def call(moment: str, **facts: int) -> None:
        for hook in get_memory_hooks().values():  # fails if a hook changes the table
            getattr(hook, moment)(**facts)

    cuda.MemoryHook, cuda.get_memory_hooks = MemoryHook, get_memory_hooks
    cuda.pool = _Pool(driver, call)
    cupy.cuda, cupy.get_default_memory_pool = cuda, lambda: cuda.pool
    sys.modules["cupy"], sys.modules["cupy.cuda"] = cupy, cuda
    return cuda


class _Chunk:
    def __init__(self, base: int, offset: int, size: int, stream: int) -> None:
        self.base, self.offset, self.size, self.stream = base, offset, size, stream
        self.before: _Chunk | None = None
        self.after: _Chunk | None = None

    @property
    def ptr(self) -> int:
        return self.base + self.offset


class _Pool:
    """SingleDeviceMemoryPool of device 0, with what is told to hooks by MemoryPool.malloc and PooledMemory.free."""

    def __init__(self, driver: Any, call: Any) -> None:
        self._driver, self._call = driver, call
        self._in_use: dict[int, _Chunk] = {}
        self._free: list[_Chunk] = []
        self._ids = itertools.count(1)

    def malloc(self, size: int, stream: int = 0) -> int:
        rounded = -(-size // _UNIT) * _UNIT
        self._call("malloc_preprocess", device_id=0, size=size, mem_size=rounded)
        ptr = 0
        try:
            ptr = self._malloc(rounded, stream) if rounded else 0
        finally:
            facts = {"device_id": 0, "size": size, "mem_size": rounded, "mem_ptr": ptr}
            self._call("malloc_postprocess", **facts, pmem_id=next(self._ids) if ptr else 0)
        return ptr

    def _malloc(self, size: int, stream: int) -> int:
        fitting = [chunk for chunk in self._free if chunk.stream == stream and chunk.size >= size]
        if fitting:
            chunk = min(fitting, key=lambda one: one.size)
            self._free.remove(chunk)
            if chunk.size > size:
                rest = _Chunk(chunk.base, chunk.offset + size, chunk.size - size, stream)
                chunk.size, rest.before, rest.after = size, chunk, chunk.after
                if rest.after is not None:
                    rest.after.before = rest
                chunk.after = rest
                self._free.append(rest)
        else:
            self._call("alloc_preprocess", device_id=0, mem_size=size)
            base = 0
            try:
                base = self._driver.malloc(size)
            finally:
                self._call("alloc_postprocess", device_id=0, mem_size=size, mem_ptr=base)
            chunk = _Chunk(base, 0, size, stream)
        self._in_use[chunk.ptr] = chunk
        return chunk.ptr

    def free(self, ptr: int) -> None:
        if ptr not in self._in_use:
            raise RuntimeError("Cannot free out-of-pool memory")
        facts = {"device_id": 0, "mem_size": self._in_use[ptr].size, "mem_ptr": ptr, "pmem_id": next(self._ids)}
        self._call("free_preprocess", **facts)
        try:
            chunk = self._in_use.pop(ptr)
            if chunk.after in self._free:
                self._free.remove(chunk.after)
                self._merge(chunk, chunk.after)
            if chunk.before in self._free:
                self._free.remove(chunk.before)
                self._merge(chunk.before, chunk)
                chunk = chunk.before
            self._free.append(chunk)
        finally:
            self._call("free_postprocess", **facts)

    @staticmethod
    def _merge(one: _Chunk, other: _Chunk) -> None:
        one.size, one.after = one.size + other.size, other.after
        if one.after is not None:
            one.after.before = one

    def free_all_blocks(self) -> None:
        for chunk in [chunk for chunk in self._free if chunk.before is None and chunk.after is None]:
            self._free.remove(chunk)
            self._driver.free(chunk.base)

    def used_bytes(self) -> int:
        return sum(chunk.size for chunk in self._in_use.values())

    def free_bytes(self) -> int:
        return sum(chunk.size for chunk in self._free)

    def total_bytes(self) -> int:
        return self.used_bytes() + self.free_bytes()
