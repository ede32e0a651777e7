"""The code that a program loads into a GPU's driver, and what its kernels may access.

A driver names functions by handles. Here each handle is followed to the image that it was loaded from::

    image (PTX, machine code, fatbin, file) -> module or library -> function or kernel -> its name in the PTX

Machine code does not tell what it accesses. Where a compiler of the process made it, its PTX is known
(:mod:`cudatool.collect.kept_ptx`).
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path

from cudatool.ptx import (
    KernelAccesses,
    PtxError,
    infer_accesses,
    is_container,
    orders_others,
    parse_image,
    pointer_offsets,
    ptx_for,
)
from cudatool.ptx.model import Module

__all__ = ["ImageKind", "KernelCode", "LoadedCode"]

_ENTRY = re.compile(rb"^(?:[ \t]*\.(?:visible|weak)[ \t]+)?[ \t]*\.entry[ \t]+([\w$]+)", re.MULTILINE)
_BRACES = re.compile(rb'[{};]|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_MOST_PTX = 1 << 20  # bytes of a kernel and the functions of its module: some 0.7 s
_ANY_ARCHITECTURE = 1 << 16  # the driver has loaded the image: some form of it suits the device


class ImageKind(IntEnum):
    """What an image of code begins with, as :file:`_cupti_launches.h` numbers it."""

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
    pointers
        Where in its arguments pointers may lie: :func:`cudatool.ptx.pointer_offsets`.
    """

    accesses: KernelAccesses
    orders: tuple[bool, bool, bool]
    pointers: tuple[int, ...]


class LoadedCode:
    """Follows handles of the driver to the PTX of what they name.

    Parameters
    ----------
    ptx_of
        Returns the PTX from which machine code was made, by its digest; None if it is not known.
    """

    def __init__(self, ptx_of: Callable[[int], bytes | None]) -> None:
        self._ptx_of = ptx_of
        self._images: dict[int, tuple[_Unit, ...]] = {}  # the PTX of modules and libraries
        self._functions: dict[int, tuple[int, str]] = {}  # of functions and kernels: the module, and the name in PTX
        self._known: dict[int, KernelCode | None] = {}
        self._kernels = itertools.count(1)
        self.plans: dict[int, bytes] = {}
        """Of functions and kernels that were launched: a number that no other has had, and
        :attr:`KernelCode.pointers`, in 8 bytes each, as :file:`_log_rows.c` takes them."""

    def loaded(self, module: int, kind: int, digest: int, image: bytes | None) -> None:
        """Note the image that a module or a library was loaded from; `image` None if it is not at hand."""
        self.unloaded(module)
        if kind == ImageKind.MACHINE_CODE:
            image = self._ptx_of(digest)
        if image is None:
            self._images[module] = ()
        else:
            self._images[module] = _of_fatbin(image) if kind == ImageKind.FATBIN else (_Unit(image),)

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
        self._forget(function)

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
            self._forget(function)

    def _forget(self, function: int) -> None:
        self._known.pop(function, None)
        self.plans.pop(function, None)

    def kernel(self, function: int, name: str) -> KernelCode | None:
        """Return what is known of a function or kernel; `name` is its own in PTX, if the driver said it."""
        if function not in self._known:
            module, found = self._functions.get(function, (0, name))
            code = self._known[function] = _inferred(self._images.get(module, ()), found or name)
            pointers = () if code is None else code.pointers  # of unknown code, nothing depends on the arguments
            self.plans[function] = array("Q", [next(self._kernels), *pointers]).tobytes()
        return self._known[function]


class _Unit:
    """One PTX text. Libraries have hundreds of kernels in one, which take seconds to parse: each is parsed alone."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def of_kernel(self, name: str) -> bytes | None:
        """Return the text without the bodies of all other kernels; None if it does not have this one."""
        wanted, kept, at = name.encode(), [], 0
        if wanted not in self._kernels:
            return None
        for kernel, (start, end) in self._kernels.items():
            if kernel != wanted and end:
                kept.append(self._text[at:start])
                at = end
        return b"".join((*kept, self._text[at:]))

    @cached_property
    def _kernels(self) -> dict[bytes, tuple[int, int]]:
        """Where each kernel begins and ends; the end is 0 if that is not known."""
        found: dict[bytes, tuple[int, int]] = {}
        at = 0
        for entry in _ENTRY.finditer(self._text):
            if entry.start() >= at:
                end = _end_of_body(self._text, entry.end())
                found[entry[1]] = entry.start(), end
                at = max(at, end)
        return found


def _of_fatbin(image: bytes) -> tuple[_Unit, ...]:
    try:
        return tuple(_Unit(text) for text in ptx_for(image, _ANY_ARCHITECTURE))
    except PtxError:
        return ()


def _inferred(units: Sequence[_Unit], name: str) -> KernelCode | None:
    """Return what the PTX says of a kernel; None if there is none, or too much to be read while a program runs."""
    for unit in units:
        text = unit.of_kernel(name)
        if text is None or len(text) > _MOST_PTX:
            continue
        try:
            module = parse_image(text)
            accesses = infer_accesses(module, name)
            return KernelCode(accesses, _orders(text, module, name), pointer_offsets(accesses))
        except PtxError:
            continue
    return None


def _orders(text: bytes, module: Module, name: str) -> tuple[bool, bool, bool]:
    return orders_others(text, lambda: module, name)


def _end_of_body(text: bytes, start: int) -> int:
    """Return where the first braces after `start` are closed; 0 if they are not, or if there is only a declaration."""
    depth = 0
    for part in _BRACES.finditer(text, start):
        match part[0]:
            case b"{":
                depth += 1
            case b"}":
                depth -= 1
                if depth <= 0:
                    return part.end()
            case b";" if not depth:
                return 0
    return 0
