"""Linked images as text: the texts of their modules, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["SEPARATOR", "join", "split"]

SEPARATOR = b"\n//@ next module of a linked image\n"


def join(texts: Iterable[bytes], registers: Mapping[str, int] | None = None) -> bytes:
    """Return the linked image of these PTX texts, each of which may be one itself.

    `registers` is what a linker has found each kernel to take as machine code.
    """
    notes = "".join(f"\n//@ registers {name} {count}" for name, count in (registers or {}).items())
    return SEPARATOR.join(text.rstrip(b"\0") for text in texts) + notes.encode()


def split(image: bytes) -> list[bytes]:
    """Return the PTX texts that a linked image consists of: the opposite of :func:`join`."""
    return image.rstrip(b"\0").split(SEPARATOR)
