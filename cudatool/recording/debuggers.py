"""Lets a running Python process run a file, through a debugger: gdb, cuda-gdb or lldb.

The debugger calls two functions there: ``mmap``, for the text of the request, and ``Py_AddPendingCall``, which lets
Python itself run that text when it can (Python/C API, Py_AddPendingCall). Neither allocates: the process may have
stopped anywhere.

No debugger reads a library's symbols: addresses come from :meth:`Target.functions`. That is quick in a program with
libraries of gigabytes, and keeps cuda-gdb on the host: it takes the GPU, and stops its kernels, only if it finds the
driver's symbols.
"""

from __future__ import annotations

import functools
import mmap
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cudatool.errors import CudatoolError, UsageError
from cudatool.recording.target import Functions, Target, how_to_allow

__all__ = ["DEBUGGERS", "ON_REQUEST", "installed", "knows_processor"]

_LONGEST_S: Final = 60.0
_PRIVATE_ANONYMOUS_FIXED: Final = 0x100022  # MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE
_FAILED: Final = 64  # statuses of gdb below are ours
_NOT_STOPPED, _NO_PAGE, _NOT_QUEUED = range(_FAILED, _FAILED + 3)
_SAID: Final = re.compile(r"^\(\w+\) \$(page|queued) = (-?\d+)$", re.MULTILINE)  # lldb's `expr $page`


def installed(method: str) -> str | None:
    """Return the program of a debugger, None if there is none."""
    return shutil.which(method)


@functools.cache
def knows_processor(method: str) -> bool:
    """Return whether a debugger that is installed can write back all registers of this processor.

    gdb before 14 has no room for those of AMX. Where it stopped a program, a call of the system then fails there with
    errno 514.
    """
    if method == "lldb" or "amx_tile" not in Path("/proc/cpuinfo").read_text():
        return True
    try:
        said = _run(method, ["--version"]).stdout
    except OSError:  # it cannot be run at all, as is said where it is used
        return True
    version = re.search(r"^GNU gdb .*?(\d+)\.\d", said, re.MULTILINE)
    return version is None or int(version[1]) >= 14


def _by_gdb(target: Target, run: Path, page: int) -> None:
    _through_gdb("gdb", target, run, page)


def _by_cuda_gdb(target: Target, run: Path, page: int) -> None:
    _through_gdb("cuda-gdb", target, run, page)


def _through_gdb(program: str, target: Target, run: Path, page: int) -> None:
    if not knows_processor(program):
        raise UsageError(
            f"this {program} does not know the registers of this processor (AMX), and would disturb the program: "
            "install gdb 14 or newer, or lldb"
        )
    call_mmap, call_add = _calls(target.functions(), page)
    commands = [
        # An error ends its own command alone: what comes after looks at what was set.
        *("set confirm off", "set $thread = 0", "set $page = 0", "set $queued = -1"),
        *("set $thread = $_thread", "set unwindonsignal on"),
        f"set $page = {call_mmap}",
        f"restore {run} binary $page",
        f"set $queued = {call_add}",
        "detach",
        f"quit !$thread ? {_NOT_STOPPED} : $page != {page} ? {_NO_PAGE} : $queued ? {_NOT_QUEUED} : 0",
    ]
    # A folder without libraries in the place of the root: cuda-gdb would read the symbols of the driver in any case.
    words = ["-batch", "-nx", "-readnever", "-iex", f"set sysroot {run.parent}", "-iex", "set auto-solib-add off"]
    words += [f"/proc/{target.pid}/exe", "-p", str(target.pid)]
    done = _run(program, [*words, *(word for line in commands for word in ("-ex", line))])
    if done.returncode == _NOT_STOPPED:
        raise UsageError(f"{program} cannot stop process {target.pid}; {how_to_allow()}")
    if done.returncode:
        raise _failure(program, target, done)


def _by_lldb(target: Target, run: Path, page: int) -> None:
    call_mmap, call_add = _calls(target.functions(), page)
    commands = [  # the first that fails is the last
        "settings set target.preload-symbols false",
        f"process attach -p {target.pid}",
        f"expr -i true -u true -- long $page = {call_mmap}",
        "expr $page",
        f"memory write -i {run} $page",
        f"expr -i true -u true -- int $queued = {call_add}",
        "expr $queued",
        "detach",
    ]
    done = _run("lldb", ["--no-lldbinit", "--batch", *(word for line in commands for word in ("-o", line))])
    said = {name: int(value) for name, value in _SAID.findall(done.stdout)}
    if "page" not in said:
        raise UsageError(f"lldb cannot stop process {target.pid}; {how_to_allow()}")
    if said != {"page": page, "queued": 0}:
        raise _failure("lldb", target, done)


def _calls(functions: Functions, page: int) -> tuple[str, str]:
    """Return the calls of mmap and of Py_AddPendingCall, in C."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    words = f"{page}, {mmap.PAGESIZE}, {protection}, {_PRIVATE_ANONYMOUS_FIXED}, -1, 0"
    return (
        f"((long (*)(long, long, int, int, int, long)) {functions.mmap})({words})",
        f"((int (*)(long, long)) {functions.add_pending_call})({functions.run_string}, $page)",
    )


def _run(method: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    program = installed(method)
    assert program is not None
    try:
        return subprocess.run(
            [program, *words],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CudatoolError(f"{program} did not end in {_LONGEST_S:g} s") from None


def _failure(method: str, target: Target, done: subprocess.CompletedProcess[str]) -> CudatoolError:
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return CudatoolError(f"{method} could not ask process {target.pid} (status {done.returncode}): {' '.join(last)}")


DEBUGGERS: Final[dict[str, Callable[[Target, Path, int], None]]] = {
    "gdb": _by_gdb,
    "lldb": _by_lldb,
    "cuda-gdb": _by_cuda_gdb,
}
"""What lets a process run a file, by the name of the debugger. The last argument is a free page of the process."""

ON_REQUEST: Final = ("cuda-gdb",)
"""Debuggers that are used only if they are named: they were tried little."""
