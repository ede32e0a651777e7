"""Interned Python stacks: capturing one costs a dictionary look-up a frame and gives an integer.

As pseudo-code of :func:`capture`::

    for each frame, innermost first:
        place = places[where the frame stands]     # one small integer per (file, function, line)
        HIDDEN: skip it        BOUNDARY: stop      otherwise: keep it
    return stacks[the places kept]                 # one integer per distinct tuple

The tables are process-wide, only grow, and need no lock: each write is one ``dict.setdefault``. A lock would not
do here, because the garbage collector may run a finalizer, which captures a stack, in the middle of a capture.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from types import CodeType, FrameType

from cudatool.trace._walk import capture, install
from cudatool.trace.model import Frame

__all__ = ["capture", "enable", "frames", "hide", "intern"]

_HIDDEN, _BOUNDARY, _KEPT = 0, -1, 1
_MAX_DEPTH = 256  # of runaway recursion, the innermost frames say enough

_enabled = True
_hidden: tuple[str, ...] = ()  # directories

# A code object's bytecode lies inside the object (CPython >= 3.11), so that its address plus the offset of the
# running instruction is a number that no other place of the program has, as long as the object lives.
_places: dict[int, int] = {}
_alive: list[CodeType] = []
_place_counter = itertools.count(1)
_place_ids: dict[Frame, int] = {}
_frames: dict[int, Frame] = {}
_stack_counter = itertools.count(1)
_stack_ids: dict[tuple[int, ...], int] = {(): 0}
_stacks: dict[int, tuple[int, ...]] = {0: ()}


def enable(on: bool) -> None:
    """Capture stacks (the default), or let every :func:`capture` return the empty stack."""
    global _enabled
    _enabled = on


def hide(directory: str) -> None:
    """Leave Python's frames of files below `directory` out of stacks from now on: a framework's, say."""
    global _hidden
    _hidden = (*_hidden, os.path.join(os.path.realpath(directory), ""))
    _role.cache_clear()


def intern(called: Iterable[Frame]) -> int:
    """Return the id of a stack that was read elsewhere, with the same frames left out as by :func:`capture`.

    Parameters
    ----------
    called
        Its frames, innermost first. One without a line is a library of machine code, which is kept wherever it lies.
    """
    if not _enabled:
        return 0
    kept: list[int] = []
    for frame in called:
        role = _role(frame.file) if frame.line else _KEPT
        if role == _BOUNDARY:
            break
        if role != _HIDDEN:
            place = _place_ids.get(frame)
            kept.append(_named(frame) if place is None else place)
    stack = tuple(kept)
    found = _stack_ids.get(stack)
    return _add_stack(stack) if found is None else found


def frames(stack: int) -> tuple[Frame, ...]:
    """Return the frames of a captured stack, innermost first.

    Raises
    ------
    KeyError
        No stack has this id.
    """
    return tuple(_frames[place] for place in _stacks[stack])


def _add_stack(stack: tuple[int, ...]) -> int:
    if len(stack) > _MAX_DEPTH:
        stack = stack[:_MAX_DEPTH]
        if stack in _stack_ids:
            return _stack_ids[stack]
    new = next(_stack_counter)
    _stacks[new] = stack  # before the id can be found
    return _stack_ids.setdefault(stack, new)


def _add_place(frame: FrameType) -> int:
    code = frame.f_code
    place = _role(code.co_filename)
    if place > 0:
        place = _named(Frame(code.co_filename, code.co_qualname, frame.f_lineno or 0))
    _alive.append(code)
    return _places.setdefault(id(code) + frame.f_lasti, place)


def _named(frame: Frame) -> int:
    place = next(_place_counter)
    _frames[place] = frame
    return _place_ids.setdefault(frame, place)


@cache
def _role(file: str) -> int:
    """Return what frames of `file` are to a stack: a place of their own, hidden, or its outer end."""
    if file.startswith("<"):  # not a file: frozen into the interpreter, or typed in
        return _HIDDEN if file.startswith(("<frozen runpy", "<frozen importlib")) else _KEPT
    try:
        path = os.path.realpath(file)
    except ValueError:  # no name of a file has that, and compile() takes any text
        return _KEPT
    callers, called = _others()
    if path.startswith(callers):
        return _BOUNDARY
    return _HIDDEN if path.startswith((*called, *_hidden)) else _KEPT


@cache
def _others() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files, or folders, of those that call a program, and of those that it calls."""

    def files(*modules: str) -> tuple[str, ...]:
        origins = [spec.origin for spec in map(find_spec, modules) if spec is not None and spec.origin is not None]
        return tuple(os.path.realpath(origin).removesuffix("__init__.py") for origin in origins)

    callers = files("cudatool.cli", "cudatool.notebook", "_pytest")
    # To look for unittest.case would import unittest, which takes the time of a small program. What calls spawn.py is
    # the command line of a process that multiprocessing started.
    for package, module in (("unittest", "case.py"), ("multiprocessing", "spawn.py")):
        callers += tuple(f"{folder}{module}" for folder in files(package))
    return callers, files("cudatool", "cudatool.viz", "numpy", "contextlib")


install(globals(), _places, _stack_ids, _add_place, _add_stack)
