"""The code that a program loads into a GPU's driver, and what its kernels may access.

A driver names functions by handles. Here each handle is followed to the image that it was loaded from::

    image (PTX, machine code, fatbin, file) -> module or library -> function or kernel -> its name in the PTX

Machine code does not tell what it accesses. Where a compiler of the process made it, its PTX is known
(:mod:`cudatool.collect.kept_ptx`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from cudatool.ptx import (
    KernelAccesses,
    PtxError,
    infer_accesses,
    is_container,
    orders_others,
    parse_image,
    ptx_for,
)
from cudatool.ptx.model import Module

__all__ = ["ImageKind", "KernelCode", "LoadedCode"]

_ENTRY = re.compile(rb"^(?:[ \t]*\.(?:visible|weak)[ \t]+)?[ \t]*\.entry[ \t]+([\w$]+)", re.MULTILINE)
_MOST_PTX = 1 << 20  # bytes of a kernel and the functions of its module: some 0.7 s
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
        self._images: dict[int, tuple[bytes, ...] | None] = {}  # the PTX of modules and libraries, one text a unit
        self._functions: dict[int, tuple[int, str]] = {}  # of functions and kernels: the module, and the name in PTX
        self._known: dict[int, KernelCode | None] = {}

    def loaded(self, module: int, kind: int, digest: int, image: bytes | None) -> None:
        """Note the image that a module or a library was loaded from; `image` None if it is not at hand."""
        self.unloaded(module)
        if kind == ImageKind.MACHINE_CODE:
            ptx = self._ptx_of(digest)
            self._images[module] = None if ptx is None else (ptx,)
        elif image is not None:
            self._images[module] = (image,) if kind == ImageKind.TEXT else _of_fatbin(image)

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
            self._known[function] = _inferred(self._images.get(module) or (), found or name)
        return self._known[function]


def _of_fatbin(image: bytes) -> tuple[bytes, ...] | None:
    try:
        return tuple(ptx_for(image, _ANY_ARCHITECTURE)) or None
    except PtxError:
        return None


def _inferred(texts: Sequence[bytes], name: str) -> KernelCode | None:
    """Return what the PTX says of a kernel; None if there is none, or too much to be read while a program runs."""
    for text in texts:
        kernel = _of_one_kernel(text, name)
        if kernel is None or len(kernel) > _MOST_PTX:
            continue
        try:
            module = parse_image(kernel)
            return KernelCode(infer_accesses(module, name), _orders(kernel, module, name))
        except PtxError:
            continue
    return None


def _orders(text: bytes, module: Module, name: str) -> tuple[bool, bool, bool]:
    return orders_others(text, lambda: module, name)


def _of_one_kernel(text: bytes, name: str) -> bytes | None:
    """Return a module without the bodies of all other kernels; None if it does not have this one.

    Libraries have hundreds of kernels in a module. Bodies are found as compilers write them, by the lines on which they
    begin and end. A text in which that fails is no PTX any more, and its kernel counts as not known.
    """
    found, kept, at = False, [], 0
    for entry in _ENTRY.finditer(text):
        if entry[1] == name.encode():
            found = True
            continue
        end = text.find(b"\n}", entry.end())
        if entry.start() < at or end < 0:
            continue
        kept.append(text[at : entry.start()])
        at = end + 2
    return b"".join((*kept, text[at:])) if found else None
