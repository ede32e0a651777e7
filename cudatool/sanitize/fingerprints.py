"""Names of findings that stay the same while lines move: baselines and CI systems know a finding by one."""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Iterable
from functools import lru_cache

from cudatool.sanitize.findings import AccessSite, BufferSite, FindingKind
from cudatool.trace.frames import user_frames
from cudatool.trace.model import Frame

__all__ = ["digest", "fingerprint", "functions"]


def fingerprint(kind: FindingKind, first: AccessSite, second: AccessSite, buffer: BufferSite | None) -> str:
    """Return 16 hexadecimal digits that name a defect by its functions and operations, not by its lines."""

    parts = [kind.value]
    for side in (first, second):
        parts += [side.operation, side.mode, side.argument, functions(side.stack)]
    parts.append(functions(buffer.stack) if buffer else "")
    return digest(parts)


@lru_cache(256)
def functions(stack: tuple[Frame, ...]) -> str:
    """Return the functions of a stack, as a part of a fingerprint: the same on every machine that runs the program.

    Frames of installed packages differ between their versions, and a comprehension has one of its own only before
    Python 3.12 (PEP 709).
    """
    return ";".join(
        f"{os.path.basename(frame.file)}:{frame.function}"
        for frame in user_frames(stack)
        if not frame.function.endswith(("<listcomp>", "<setcomp>", "<dictcomp>"))
    )


def digest(parts: Iterable[str]) -> str:
    """Return 16 hexadecimal digits for `parts`."""
    return hashlib.sha256("\0".join(parts).encode(errors="backslashreplace")).hexdigest()[:16]
