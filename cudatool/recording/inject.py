"""Asks a running Python process to do something of ours, by the means that its system has for debuggers.

::

    this process                                  the other one
    ------------                                  -------------
    writes the request into a directory
    sys.remote_exec (PEP 768), or gdb: --------->  its main thread runs the request between two bytecodes:
                                                   it takes the request, and starts a thread that
    waits for the reply  <-----------------------  does the work and writes the reply

The main thread may hold any lock, so it only starts a thread. The request is taken by renaming a file: it is carried
out once, or withdrawn and never carried out.

gdb calls two functions there: ``mmap``, for the text of the request, and ``Py_AddPendingCall``, which lets Python
itself run that text when it can (Python/C API, Py_AddPendingCall). Neither allocates: the process may have stopped
anywhere.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cudatool.errors import CudatoolError, UsageError
from cudatool.recording.attached import Answer

__all__ = ["METHODS", "Target", "ask"]

_NOTHING: Final = Path(__file__).with_name("nothing.py")
_PAUSE_S: Final = 0.02
_WORK_S: Final = 60.0  # for the process to do what it has begun: it may import the runtime
_GDB_S: Final = 60.0
_ASKED, _TAKEN, _WITHDRAWN, _REPLY = "request.py", "taken.py", "withdrawn.py", "reply.json"
_PRIVATE_ANONYMOUS_FIXED: Final = 0x100022  # MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE
_FAILED: Final = 64  # statuses of gdb below are ours
_NOT_STOPPED, _NO_PYTHON, _NO_PAGE, _NOT_QUEUED = range(_FAILED, _FAILED + 4)

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


@dataclass(frozen=True, slots=True)
class Target:
    """A running Python process.

    Attributes
    ----------
    pid, user
        Its number, and the user who owns it.
    version
        Of its Python, such as ``(3, 12)``; None if its files do not say.
    name
        A short name for files: that of its program.
    """

    pid: int
    user: int
    version: tuple[int, int] | None
    name: str

    @staticmethod
    def of(pid: int) -> Target:
        """Return the process with a number.

        Raises
        ------
        UsageError
            There is none, it is not Python's, or the system does not let us look into it; the message says what to do.
        """
        place = f"/proc/{pid}"
        try:
            user = os.stat(place).st_uid
            words = Path(place, "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            raise UsageError(f"there is no process {pid}") from None
        if pid == os.getpid():
            raise UsageError("this is the process of the command itself")
        if os.geteuid() not in (0, user):
            raise UsageError(f"process {pid} is another user's; run this as that user, or as root")
        try:
            maps = Path(place, "maps").read_text("utf-8", "replace")
            same = os.readlink(f"{place}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        except PermissionError:
            raise UsageError(f"the system does not let this process look into process {pid}; {_allow()}") from None
        found = re.search(r"/(?:lib)?python(\d)\.(\d+)[^/]*$", maps, re.MULTILINE)
        if found is None and not re.search(r"/(?:lib)?python[^/]*$", maps, re.MULTILINE):
            raise UsageError(f"process {pid} is not a Python program")
        if not same:
            raise UsageError(f"process {pid} runs in a container with other files; run this inside of it")
        version = (int(found[1]), int(found[2])) if found else None
        return Target(pid, user, version, _name([os.fsdecode(word) for word in words if word]))

    @property
    def tracer(self) -> int:
        """The process that debugs this one, 0 for none."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"^TracerPid:\s*(\d+)", status, re.MULTILINE)
        return int(found[1]) if found else 0


def _name(words: list[str]) -> str:
    """Return the name of the program in ``python [OPTIONS] PROGRAM``."""
    for number, word in enumerate(words[1:], 1):
        if word == "-c":
            return "code"
        if word == "-m":
            return words[number + 1].rpartition(".")[2] if number + 1 < len(words) else "python"
        if not word.startswith("-"):
            return os.path.splitext(os.path.basename(word))[0] or "python"
    return "python"


def _allow() -> str:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope and os.geteuid():
        return (
            f"kernel.yama.ptrace_scope is {scope}: run this as root, or set it to 0 (sysctl kernel.yama.ptrace_scope=0)"
        )
    return "run this as root, or give it the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"


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
        size = mmap.PAGESIZE
        page = (_free_page(target.pid, size), size) if chosen == "gdb" else None
        text = _REQUEST.format(
            folder=folder, request=dict(request), page=page, reply=_REPLY, asked=_ASKED, taken=_TAKEN
        )
        asked = Path(folder, _ASKED)
        asked.write_text(text)
        run = Path(folder, "run.py")
        run.write_bytes(_RUN.format(path=str(asked)).encode() + b"\0" * (chosen == "gdb"))
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
    chosen = method if method != "auto" else "remote-exec" if by_python else "gdb"
    if chosen == "gdb":
        if shutil.which("gdb") is None:
            raise UsageError(
                "gdb is not installed, and without it only a Python 3.14 or newer can be asked, by the same version; "
                "install gdb (apt-get install gdb)"
            )
        if target.tracer:
            raise UsageError(f"process {target.pid} is being debugged by process {target.tracer}; end that first")
    return chosen


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
    if answer["code"] == Answer.NOT_IMPORTABLE:
        raise CudatoolError(
            f"process {target.pid} cannot import cudatool ({answer['text']}); install it for {answer['python']}"
        )
    if answer["code"] in (Answer.REFUSED, Answer.FAILED):
        raise CudatoolError(f"process {target.pid}: {answer['text']}")
    return answer


def _free_page(pid: int, size: int) -> int:
    """Return an address where a process has nothing mapped."""
    used = []
    for line in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines():
        first, _, last = line.split(maxsplit=1)[0].partition("-")
        used.append((int(first, 16), int(last, 16)))
    address = 0x2000_0000_0000
    while any(first < address + size and address < last for first, last in used):
        address += 1 << 30
    return address


def _by_remote_exec(target: Target, run: Path, page: int) -> None:
    try:
        sys.remote_exec(target.pid, str(run))  # type: ignore[attr-defined]  # since Python 3.14
    except PermissionError:
        raise UsageError(f"the system does not let this process look into process {target.pid}; {_allow()}") from None
    except (OSError, RuntimeError) as error:
        raise CudatoolError(f"process {target.pid} cannot be asked: {error}") from error


def _by_gdb(target: Target, run: Path, page: int) -> None:
    size = mmap.PAGESIZE
    flags, protection = _PRIVATE_ANONYMOUS_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    commands = [
        # An error ends its own command alone: what comes after looks at what was set.
        *("set confirm off", "set $thread = 0", "set $python = 0", "set $page = 0", "set $queued = -1"),
        *("set $thread = $_thread", "set unwindonsignal on"),
        *(f"sharedlibrary {library}" for library in ("libc", "musl", "libpython")),
        "set $python = (long) &Py_AddPendingCall && (long) &PyRun_SimpleString",
        f"set $page = ((long (*)(long, long, int, int, int, long)) mmap)({page}, {size}, {protection}, {flags}, -1, 0)",
        f"restore {run} binary $page",
        "set $queued = ((int (*)(long, long)) Py_AddPendingCall)((long) &PyRun_SimpleString, $page)",
        "detach",
        f"quit !$thread ? {_NOT_STOPPED} : !$python ? {_NO_PYTHON} : $page != {page} ? {_NO_PAGE} : "
        f"$queued ? {_NOT_QUEUED} : 0",
    ]
    words = ["gdb", "-batch", "-nx", "-iex", "set auto-solib-add off", "-p", str(target.pid)]
    done = subprocess.run(
        [*words, *(word for line in commands for word in ("-ex", line))],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_GDB_S,
        check=False,
    )
    if done.returncode == _NOT_STOPPED:
        raise UsageError(f"gdb cannot stop process {target.pid}; {_allow()}")
    if done.returncode == _NO_PYTHON:
        raise UsageError(f"process {target.pid} has no Python that gdb can find")
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise CudatoolError(f"gdb could not ask process {target.pid} (status {done.returncode}): {' '.join(last)}")


METHODS: Final[dict[str, Callable[[Target, Path, int], None]]] = {"remote-exec": _by_remote_exec, "gdb": _by_gdb}
"""The ways to let a process run a file: name -> what does it. The last argument is the free page, for gdb."""
