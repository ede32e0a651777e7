"""The code that a program loads into a GPU's driver, and what its kernels may access.

A driver names functions by handles. Here each handle is followed to the image that it was loaded from::

    image (PTX, machine code, fatbin, file) -> module or library -> function or kernel -> its name in the PTX

Machine code does not tell what it accesses. Where a compiler of the process made it, its PTX is known
(:mod:`cudatool.collect.kept_ptx`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

from cudatool.ptx import (
    KernelAccesses,
    PtxError,
    infer_accesses,
    is_container,
    join,
    orders_others,
    parse_image,
    ptx_for,
)
from cudatool.ptx.model import Module

__all__ = ["ImageKind", "KernelCode", "LoadedCode"]

_ANY_ARCHITECTURE = 1 << 16  # the driver has loaded the image: some form of it suits the device


class ImageKind(IntEnum):
    """What an image of code begins with, as :file:`_cupti.c` numbers it."""

    TEXT = 1
    MACHINE_CODE = 2
    FATBIN = 3


@dataclass(frozen=True, slots=True)
class KernelCode:
    """What is known of a kernel from its PTX.

    Attributes
    ----------
    accesses
        What it may access.
    orders
        How it takes part in the order of work: :func:`cudatool.ptx.orders_others`.
    """

    accesses: KernelAccesses
    orders: tuple[bool, bool, bool]


class LoadedCode:
    """Follows handles of the driver to the PTX of what they name.

    Parameters
    ----------
    ptx_of
        Returns the PTX from which machine code was made, by its digest; None if it is not known.
    """

    def __init__(self, ptx_of: Callable[[int], bytes | None]) -> None:
        self._ptx_of = ptx_of
        self._images: dict[int, bytes | None] = {}  # of modules and libraries
        self._functions: dict[int, tuple[int, str]] = {}  # of functions and kernels: the module, and the name in PTX
        self._known: dict[int, KernelCode | None] = {}

    def loaded(self, module: int, kind: int, digest: int, image: bytes | None) -> None:
        """Note the image that a module or a library was loaded from; `image` None if it is not at hand."""
        ptx: bytes | None = None
        if kind == ImageKind.MACHINE_CODE:
            ptx = self._ptx_of(digest)
        elif image is not None:
            ptx = image if kind == ImageKind.TEXT else _of_fatbin(image)
        self.unloaded(module)
        self._images[module] = ptx

    def loaded_from(self, module: int, path: str, digest: Callable[[bytes], int]) -> None:
        """Note that a module or a library was loaded from a file."""
        try:
            image = Path(path).read_bytes()
        except OSError:
            image = b""
        is_elf = image.startswith(b"\x7fELF")
        kind = ImageKind.MACHINE_CODE if is_elf else ImageKind.FATBIN if is_container(image) else ImageKind.TEXT
        self.loaded(module, kind, digest(image) if is_elf else 0, image or None)

    def found(self, function: int, module: int, name: str) -> None:
        """Note the module or library of a function or kernel, and its name there."""
        self._functions[function] = module, name
        self._known.pop(function, None)

    def same(self, handle: int, other: int) -> None:
        """Note that a function is that of a kernel, or a module that of a library."""
        if other in self._functions:
            self.found(handle, *self._functions[other])
        if other in self._images:
            self.unloaded(handle)
            self._images[handle] = self._images[other]

    def unloaded(self, module: int) -> None:
        """Forget a module or library, and its functions: the driver may use the handles again."""
        if self._images.pop(module, None) is None:
            return
        gone = [function for function, (of, _) in self._functions.items() if of == module]
        for function in gone:
            del self._functions[function]
            self._known.pop(function, None)

    def kernel(self, function: int, name: str) -> KernelCode | None:
        """Return what is known of a function or kernel; `name` is its own in PTX, if the driver said it."""
        if function not in self._known:
            module, found = self._functions.get(function, (0, name))
            ptx = self._images.get(module)
            self._known[function] = None if ptx is None else _inferred(ptx, found or name)
        return self._known[function]


def _of_fatbin(image: bytes) -> bytes | None:
    try:
        texts = ptx_for(image, _ANY_ARCHITECTURE)
    except PtxError:
        return None
    return join(texts) if texts else None


@lru_cache(maxsize=64)
def _parsed(ptx: bytes) -> Module | None:
    try:
        return parse_image(ptx)
    except PtxError:
        return None


def _inferred(ptx: bytes, name: str) -> KernelCode | None:
    module = _parsed(ptx)
    if module is None:
        return None
    try:
        return KernelCode(infer_accesses(module, name), orders_others(ptx, lambda: module, name))
    except PtxError:
        return None
