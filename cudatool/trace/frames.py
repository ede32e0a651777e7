"""Whose line is this: the user's own frames of a stack, and call sites in words.

All reports choose the frame that a user is to look at here. A frame is the user's own unless its file is part of the
interpreter's installation, of an installed package, or of PyTorch's sources, or PyTorch's compiler generated it. It is
judged by the path, because a trace may be of another machine; of packages in other folders the trace's header has the
paths (:mod:`cudatool.trace.packages`). Frames of C++ are the user's own only where a stack has no others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

from cudatool.text import shortened
from cudatool.trace.model import Frame, PackageFrame, Trace

__all__ = [
    "MissingStack",
    "call_site",
    "call_sites",
    "calling_library",
    "cell_name",
    "file_name",
    "frame_rank",
    "frame_words",
    "is_generated",
    "is_installed",
    "missing_stack",
    "site_frames",
    "user_files",
    "user_frame",
    "user_frames",
]

_INSTALLED = re.compile(
    r"[/\\](site|dist)-packages[/\\]"
    r"|[/\\]lib(64)?[/\\]python\d\.\d+[/\\]"
    r"|^<frozen "
    # A checkout of PyTorch that is used in place, or paths that its wheels were built with.
    r"|(^|[/\\])torch[/\\](csrc|nn|optim|autograd|cuda|utils|distributed|amp|fx|jit|_\w+)[/\\]"
    r"|^torch[/\\]"
)
# What PyTorch's compiler writes, wherever TORCHINDUCTOR_CACHE_DIR is: a file named by a hash, in a folder named by the
# first two characters of it (torch._inductor.codecache, get_path).
_GENERATED = re.compile(r"[/\\]([a-z2-7]{2})[/\\]c\1[a-z2-7]{49}\.py$")
_NATIVE = re.compile(r"\.(c|cc|cpp|cxx|h|hpp|cu|cuh)$")
# Functions of C++ that every allocation goes through.
_PLUMBING = re.compile(
    r"torch::unwind|torch::CapturedTraceback|torch::cuda::gather|c10::|std::|at::detail|at::_ops|at::wrapper|at::empty|"
    r"at::native::empty|at::create_out"
)
_LIBRARY = re.compile(r"\.so(\.|$)")
_LONGEST_NAME = 80
_PART_OF_HASH = 8  # enough to tell the files of one program apart


def frame_rank(frame: Frame) -> int:
    """Return 0 for the user's own code, 1 for a library's Python, 2 for C++, 3 for C++ of the allocator's own."""
    if frame.line > 0 and not _NATIVE.search(frame.file):
        return 1 if isinstance(frame, PackageFrame) or is_installed(frame.file) else 0
    return 3 if _PLUMBING.match(_native_name(frame.function)) else 2


@lru_cache(4096)
def is_installed(file: str) -> bool:
    """Return whether the path of a file tells that it is not the user's own."""
    return bool(_INSTALLED.search(file)) or is_generated(file)


def is_generated(file: str) -> bool:
    """Return whether a file is code that PyTorch's compiler generated, by its path."""
    return bool(_GENERATED.search(file))


def user_files(trace: Trace) -> list[str]:
    """Return the files of the user's own code in a trace's stacks, sorted."""
    return sorted({frame.file for frame in trace.frames if not frame_rank(frame)})


def user_frames(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames of the lowest :func:`frame_rank` in a stack, innermost first: the user's own if it has any."""
    known = _known.get(id(stack))
    if known is None or known[0] is not stack:
        known = stack, _own(stack)
        if isinstance(stack, tuple):  # it never changes
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[id(stack)] = known
    return known[1]


_known: dict[int, tuple[Sequence[Frame], tuple[Frame, ...]]] = {}
"""Stacks by identity, kept alive so that no other gets it: many findings ask for the same long stacks again."""
_MOST_KNOWN = 1024


def _own(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    ranks = [frame_rank(frame) for frame in stack]
    lowest = min(ranks, default=0)
    return tuple(frame for frame, rank in zip(stack, ranks, strict=True) if rank == lowest)


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's own code, None for an empty stack."""
    return next(iter(user_frames(stack)), None)


def site_frames(stack: Sequence[Frame]) -> tuple[Frame, Frame] | None:
    """Return the user's own frame and the innermost one, both of Python if there are any; None for an empty stack."""
    own = user_frame(stack)
    if own is None:
        return None
    return own, own if frame_rank(own) else next(frame for frame in stack if frame_rank(frame) < 2)


def call_site(stack: Sequence[Frame]) -> str:
    """Return the innermost frame of the user's own code, as ``"train.py:12 (step)"``; empty for an empty stack.

    Where that is not the innermost of Python's, the library's is added: ``"train.py:12 (step) via adam.py:8 (init)"``;
    and where a library of machine code made the call, which: ``"train.py:12 (step) by libcublas.so.13"``.
    """
    found = site_frames(stack)
    if found is None:
        return ""
    own, innermost = found
    words = frame_words(own) if own == innermost else f"{frame_words(own)} via {frame_words(innermost)}"
    library = calling_library(stack)
    return f"{words} by {library}" if library and own != stack[0] else words


def calling_library(stack: Sequence[Frame]) -> str:
    """Return the name of the library of machine code that made the call, empty if that is not known.

    Recordings on a GPU have it as the innermost frame, which has no line: ``libcublas.so.13``, or ``cupy.cuda.memory``
    where the library is a module of Python.
    """
    inner = stack[0] if stack else None
    if inner is None or inner.line or not _LIBRARY.search(inner.file):
        return ""
    return inner.function if "(" not in inner.function else ""


def call_sites(stacks: Sequence[Sequence[Frame]]) -> list[str]:
    """Return the call sites of different stacks, each unlike the others: of equal ones, with the callers that differ.

    Equal stacks have equal words.
    """
    words = [call_site(stack) for stack in stacks]
    by_words: dict[str, dict[tuple[Frame, ...], None]] = {}
    for word, stack in zip(words, stacks, strict=True):
        by_words.setdefault(word, {})[tuple(stack)] = None
    unique: dict[tuple[Frame, ...], str] = {}
    for word, alike in by_words.items():
        unique.update(zip(alike, _told_apart(word, list(alike)), strict=True))
    return [unique[tuple(stack)] for stack in stacks]


def _told_apart(word: str, stacks: list[tuple[Frame, ...]]) -> list[str]:
    """Return `word` with what distinguishes the stacks: the innermost frame that not all have, else a number."""
    if len(stacks) == 1:
        return [word]
    spelled = [[frame_words(frame) for frame in stack] for stack in stacks]
    common = set.intersection(*(set(frames) for frames in spelled))
    texts = [
        f"{word}, from {place}" if (place := next((one for one in frames if one not in common), "")) else word
        for frames in spelled
    ]
    result = []
    for number, text in enumerate(texts):
        again = texts[:number].count(text)
        result.append(f"{text} #{again + 1}" if again or texts.count(text) > 1 else text)
    return result


def frame_words(frame: Frame) -> str:
    """Return a frame as ``"train.py:12 (step)"``, or the function's name where C++ has no line."""
    if not frame.line:  # of C++ without debug information
        return shortened(_native_name(frame.function), _LONGEST_NAME)
    # The line says where in its file a nested function is; the names of those around it say no more.
    function = frame.function.rpartition("<locals>.")[2]
    name = file_name(frame.file)
    if is_generated(frame.file):
        name = f"{name[:_PART_OF_HASH]}...py"
    return f"{name}:{frame.line} ({shortened(function, _LONGEST_NAME)})"


def file_name(path: str) -> str:
    """Return the last part of a path of any system."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def cell_name(file: str) -> str:
    """Return how a notebook names a cell, ``In[3]``, for its temporary file in this process; another file as it is."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    found = None if shell is None else shell.compile.format_code_name(file)
    return file if found is None else str(found[1])


def _native_name(function: str) -> str:
    """Return the name of a C++ function without return type and arguments."""
    name, bracket, arguments = function.replace("(anonymous namespace)::", "").split("(")[0].partition("<")
    return name.rsplit(" ", 1)[-1] + bracket + arguments


class MissingStack(StrEnum):
    """Why an allocation has no stack."""

    TURNED_OFF = "turned-off"
    """The program was recorded with ``--no-stacks``."""
    BEFORE = "before-recording"
    """It was there before the recording began."""
    HISTORY_OFF = "history-off"
    """It was allocated while PyTorch's history was off, which was on for a part of the time."""
    NOT_KEPT = "not-in-file"
    """The file keeps no stacks at all."""
    NO_FRAMES = "no-python-frames"
    """Others have stacks: it was made by a thread without Python frames, such as that of PyTorch's backward pass."""

    @property
    def text(self) -> str:
        """The reason as a label."""
        return _MISSING[self]


_MISSING = {
    MissingStack.TURNED_OFF: "(no stack: recorded with --no-stacks)",
    MissingStack.BEFORE: "(no stack: allocated before the recording)",
    MissingStack.HISTORY_OFF: "(no stack: PyTorch's history was off)",
    MissingStack.NOT_KEPT: "(no stack in this file)",
    MissingStack.NO_FRAMES: "(no stack: a thread without Python frames)",
}


def missing_stack(trace: Trace, *, before: bool = False) -> MissingStack:
    """Return why an allocation of a trace has no stack.

    Parameters
    ----------
    before
        Whether it was there before the recording began.
    """
    if trace.header.get("stacks") is False:
        return MissingStack.TURNED_OFF
    if before:
        return MissingStack.BEFORE if "history_kept" not in trace.header else MissingStack.HISTORY_OFF
    return MissingStack.NO_FRAMES if any(trace.stacks) else MissingStack.NOT_KEPT
