"""A recording that begins in the middle of a program and may end before it: what ``attach`` and ``detach`` ask for.

One for each process. At the program's end it is closed like any other.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from cudatool import recording
from cudatool.errors import CudatoolError, UsageError

if TYPE_CHECKING:
    from cudatool.trace.recorder import Recorder

__all__ = ["ReplyCode", "answer", "begin", "end"]


class ReplyCode(StrEnum):
    """What a process answers: ``code`` of the reply."""

    BEGUN = "begun"
    """It records to ``trace``."""
    ENDED = "ended"
    """It recorded to ``trace``."""
    REFUSED = "refused"
    """``text`` says why."""
    NOT_IMPORTABLE = "not-importable"
    """It cannot import this module; ``text`` says why, ``python`` is its interpreter."""
    FAILED = "failed"
    """``text`` is the exception."""


class _State:
    """Of the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: ExitStack | None = None
        self.recorder: Recorder | None = None
        self.process = 0
        self.ends_at_exit = False


_state = _State()


def begin(path: str, **options: Any) -> str:
    """Begin to record this process, and return the path of the trace.

    `options` are those of :func:`cudatool.recording.record`.

    Raises
    ------
    UsageError
        The process is being recorded already.
    OutputError
        The trace cannot be written.
    """
    with _state.lock:
        if _is_attached() or recording.is_observing():
            where = f" to {_state.recorder.place}" if _is_attached() and _state.recorder is not None else ""
            raise UsageError(f"it is being recorded already{where}")
        with ExitStack() as stack:
            recorder = stack.enter_context(recording.record(path, **options))
            _state.open, _state.recorder, _state.process = stack.pop_all(), recorder, os.getpid()
        if not _state.ends_at_exit:
            atexit.register(_end_at_exit)
            _state.ends_at_exit = True
        return recorder.place


def end() -> str:
    """End what :func:`begin` began, and return the path of the trace.

    Raises
    ------
    UsageError
        Nothing was begun, or this is a child of the process that was.
    """
    with _state.lock:
        if not _is_attached() or _state.open is None or _state.recorder is None:
            other = recording.is_observing()
            raise UsageError(
                "its recording was not begun by `cudatool attach`, and ends with the program"
                if other
                else "it is not being recorded"
            )
        stack, recorder = _state.open, _state.recorder
        _state.open = _state.recorder = None
        stack.close()
        return recorder.place


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request says, and return the reply. A request has ``what``: ``"begin"``, with options, or ``"end"``."""
    try:
        if request["what"] == "begin":
            return {"code": ReplyCode.BEGUN, "trace": begin(request["path"], **request["options"])}
        return {"code": ReplyCode.ENDED, "trace": end()}
    except CudatoolError as error:
        return {"code": ReplyCode.REFUSED, "text": str(error)}


def _is_attached() -> bool:
    return _state.open is not None and _state.process == os.getpid()


def _end_at_exit() -> None:
    if _is_attached():
        end()
