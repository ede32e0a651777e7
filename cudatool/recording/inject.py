"""Asks a running Python process to do something of ours, by the means that its system has for debuggers.

::

    this process                                  the other one
    ------------                                  -------------
    writes the request into a directory
    sys.remote_exec (PEP 768), or a debugger: -->  its main thread runs the request between two bytecodes:
                                                   it takes the request, and starts a thread that
    waits for the reply  <-----------------------  does the work and writes the reply

The main thread may hold any lock, so it only starts a thread. The request is taken by renaming a file: it is carried
out once, or withdrawn and never carried out.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cudatool.errors import CudatoolError, UsageError
from cudatool.recording.attached import ReplyCode
from cudatool.recording.debuggers import DEBUGGERS, ON_REQUEST, installed, knows_processor
from cudatool.recording.target import Target, how_to_allow

__all__ = ["METHODS", "ask"]

_NOTHING: Final = Path(__file__).with_name("nothing.py")
_PAUSE_S: Final = 0.02
_WORK_S: Final = 60.0  # for the process to do what it has begun: it may import the runtime
_ASKED, _TAKEN, _WITHDRAWN, _REPLY = "request.py", "taken.py", "withdrawn.py", "reply.json"

_REQUEST: Final = """\
import os, threading

folder, request, page = {folder!r}, {request!r}, {page!r}

def work():
    import ctypes, json, sys
    if page:
        ctypes.CDLL(None).munmap(ctypes.c_void_p(page[0]), ctypes.c_size_t(page[1]))
    try:
        try:
            from cudatool.recording import attached
        except ImportError as error:
            reply = {{"code": "not-importable", "text": str(error), "python": sys.executable}}
        else:
            reply = attached.answer(request)
    except BaseException as error:
        reply = {{"code": "failed", "text": f"{{type(error).__name__}}: {{error}}"}}
    path = os.path.join(folder, {reply!r})
    with open(path + ".new", "w") as file:
        json.dump(reply, file)
    os.replace(path + ".new", path)

os.rename(os.path.join(folder, {asked!r}), os.path.join(folder, {taken!r}))
threading.Thread(target=work, name="cudatool attach", daemon=True).start()
"""
_RUN: Final = """\
try:
    exec(open({path!r}).read(), {{"__name__": "cudatool_attach"}})
except BaseException:
    pass
"""
"""What runs in the module ``__main__`` of the process: it adds no name, and raises nothing."""


class _WithdrawnError(CudatoolError):
    """The request was not taken in time, and never will be."""


def ask(target: Target, request: Mapping[str, Any], *, wait_s: float, method: str = "auto") -> dict[str, Any]:
    """Return the reply of a process to a request (:func:`cudatool.recording.attached.answer`).

    Parameters
    ----------
    wait_s
        How long its main thread may take to run Python code. Then the request is withdrawn.
    method
        A name of :data:`METHODS`, or ``"auto"``.

    Raises
    ------
    CudatoolError
        The request could not be given to it, was withdrawn, or failed; the message says what to do.
    """
    chosen = _chosen(target, method)
    folder = tempfile.mkdtemp(prefix="cudatool-attach-")
    try:
        page = (target.free_page(), mmap.PAGESIZE) if chosen in DEBUGGERS else None
        text = _REQUEST.format(
            folder=folder, request=dict(request), page=page, reply=_REPLY, asked=_ASKED, taken=_TAKEN
        )
        asked = Path(folder, _ASKED)
        asked.write_text(text)
        run = Path(folder, "run.py")
        run.write_bytes(_RUN.format(path=str(asked)).encode() + b"\0" * (chosen in DEBUGGERS))
        if not os.geteuid():
            for path in (folder, asked, run):
                os.chown(path, target.user, -1)
        METHODS[chosen](target, run, page[0] if page else 0)
        try:
            return _reply(target, Path(folder), wait_s)
        except _WithdrawnError:
            if chosen == "remote-exec":  # it would complain that its file is missing
                METHODS[chosen](target, _NOTHING, 0)
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _chosen(target: Target, method: str) -> str:
    own = sys.version_info[:2]
    by_python = hasattr(sys, "remote_exec") and target.version == own
    if method == "remote-exec" and not by_python:
        version = ".".join(map(str, target.version or ())) or "unknown"
        raise UsageError(
            f"remote-exec needs Python 3.14 or newer, and the same one on both sides; process {target.pid} has Python "
            f"{version}, and this command {own[0]}.{own[1]}"
        )
    if method == "remote-exec" or (method == "auto" and by_python):
        return "remote-exec"
    wanted = [name for name in DEBUGGERS if name not in ON_REQUEST] if method == "auto" else [method]
    found = [name for name in wanted if installed(name)]
    if not found:
        missing, install = ("neither gdb nor lldb is", "gdb") if method == "auto" else (f"{method} is not", method)
        raise UsageError(
            f"{missing} installed, and without a debugger only a Python 3.14 or newer can be asked, by the same "
            f"version; install one (apt-get install {install}){_others(method)}"
        )
    if target.tracer:
        raise UsageError(f"process {target.pid} is being debugged by process {target.tracer}; end that first")
    return next(filter(knows_processor, found), found[0])


def _others(method: str) -> str:
    """Return which debuggers there are that the user would have to name, as the rest of a sentence."""
    there = [name for name in ON_REQUEST if name != method and installed(name)]
    return f", or name the one that is there: --method {there[0]}" if there else ""


def _reply(target: Target, folder: Path, wait_s: float) -> dict[str, Any]:
    reply, until = folder / _REPLY, time.monotonic() + wait_s
    while not reply.exists():
        if not os.path.exists(f"/proc/{target.pid}"):
            raise CudatoolError(f"process {target.pid} ended")
        if time.monotonic() >= until:
            try:
                os.rename(folder / _ASKED, folder / _WITHDRAWN)
                withdrawn = True
            except OSError:
                withdrawn = False  # it was taken
            if withdrawn:
                raise _WithdrawnError(
                    f"the main thread of process {target.pid} ran no Python code for {wait_s:g} s: it waits, or is in "
                    "a long call. Nothing was changed; try again, or wait longer with --wait"
                )
            if time.monotonic() >= until + _WORK_S:
                raise CudatoolError(f"process {target.pid} began, and has not answered for {_WORK_S:g} s")
        time.sleep(_PAUSE_S)
    answer: dict[str, Any] = json.loads(reply.read_text())
    if answer["code"] == ReplyCode.NOT_IMPORTABLE:
        raise CudatoolError(
            f"process {target.pid} cannot import cudatool ({answer['text']}); install it for {answer['python']}"
        )
    if answer["code"] in (ReplyCode.REFUSED, ReplyCode.FAILED):
        raise CudatoolError(f"process {target.pid}: {answer['text']}")
    return answer


def _by_remote_exec(target: Target, run: Path, page: int) -> None:
    try:
        sys.remote_exec(target.pid, str(run))  # type: ignore[attr-defined]  # since Python 3.14
    except PermissionError:
        raise UsageError(
            f"the system does not let this process look into process {target.pid}; {how_to_allow()}"
        ) from None
    except (OSError, RuntimeError) as error:
        raise CudatoolError(f"process {target.pid} cannot be asked: {error}") from error


METHODS: Final[dict[str, Callable[[Target, Path, int], None]]] = {"remote-exec": _by_remote_exec, **DEBUGGERS}
"""The ways to let a process run a file: name -> what does it. The last argument is the free page, for debuggers."""
