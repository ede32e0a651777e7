"""A running Python process that is to be recorded: who owns it, what it runs, and where its functions are."""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from cudatool.errors import CudatoolError, UsageError

__all__ = ["Functions", "Target", "how_to_allow"]

_PYTHON: Final = re.compile(r"/(?:lib)?python[^/]*$", re.MULTILINE)
_VERSION: Final = re.compile(r"/(?:lib)?python(\d)\.(\d+)[^/]*$", re.MULTILINE)
_C_LIBRARY: Final = re.compile(r"/(?:libc[.-]|ld-musl-)[^/]*$")

# ELF, 64 bits (Tool Interface Standard, "ELF: Executable and Linkable Format"; elf.h)
_HEADER: Final = struct.Struct("<4s12xHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_MOVABLE, _LOADED, _DYNAMIC_SYMBOLS = 3, 1, 11  # ET_DYN, PT_LOAD, SHT_DYNSYM


@dataclass(frozen=True, slots=True)
class Functions:
    """Addresses of functions in a process, so that a debugger need not read the symbols of all its libraries."""

    mmap: int
    add_pending_call: int
    run_string: int


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
        except (FileNotFoundError, ProcessLookupError):  # also where its parent has yet to learn of its end
            raise UsageError(f"process {pid} has ended") from None
        except PermissionError:
            raise UsageError(
                f"the system does not let this process look into process {pid}; {how_to_allow()}"
            ) from None
        found = _VERSION.search(maps)
        if found is None and not _PYTHON.search(maps):
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

    def free_page(self) -> int:
        """Return an address where the process has nothing mapped."""
        size = mmap.PAGESIZE
        address = 0x2000_0000_0000
        while any(first < address + size and address < last for first, last, _, _ in self._mapped()):
            address += 1 << 30
        return address

    def functions(self) -> Functions:
        """Return the addresses of what a debugger calls.

        Raises
        ------
        CudatoolError
            One is not found; the message says which.
        """
        try:
            executable = os.readlink(f"/proc/{self.pid}/exe")
        except (FileNotFoundError, ProcessLookupError):
            raise CudatoolError(f"process {self.pid} has ended") from None
        of_python, of_c = ("Py_AddPendingCall", "PyRun_SimpleString"), ("mmap",)
        found: dict[str, int] = {}
        for path, start in self._files():
            wanted = of_c if _C_LIBRARY.search(path) else of_python
            if wanted is of_c or path == executable or _PYTHON.search(path):
                found = _exported(path, start, wanted) | found
        missing = [name for name in (*of_c, *of_python) if name not in found]
        if missing:
            raise CudatoolError(
                f"process {self.pid} has no function {missing[0]} that a debugger could call, or the file with it was "
                "replaced since the program started"
            )
        return Functions(*(found[name] for name in (*of_c, *of_python)))

    def _files(self) -> Iterator[tuple[str, int]]:
        """Yield each mapped file, and where its beginning is."""
        seen = set()
        for first, _, offset, path in self._mapped():
            if path.startswith("/") and not offset and path not in seen:
                seen.add(path)
                yield path, first

    def _mapped(self) -> Iterator[tuple[int, int, int, str]]:
        """Yield what is mapped: first and last address, offset in the file, path."""
        for line in Path(f"/proc/{self.pid}/maps").read_text("utf-8", "replace").splitlines():
            words = line.split(maxsplit=5)
            first, _, last = words[0].partition("-")
            yield int(first, 16), int(last, 16), int(words[2], 16), words[5] if len(words) > 5 else ""


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


def how_to_allow() -> str:
    """Return what lets one process look into another, as an instruction."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope and os.geteuid():
        return (
            f"kernel.yama.ptrace_scope is {scope}: run this as root, or set it to 0 (sysctl kernel.yama.ptrace_scope=0)"
        )
    return "run this as root, or give it the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"


def _exported(path: str, start: int, names: tuple[str, ...]) -> dict[str, int]:
    """Return the addresses of the functions that an ELF file exports under these names, if it is mapped at `start`."""
    try:
        with open(path, "rb") as file:
            return _dynamic_symbols(file, start, names)
    except (OSError, struct.error):  # replaced while the program runs, or not of this kind
        return {}


def _dynamic_symbols(file: IO[bytes], start: int, names: tuple[str, ...]) -> dict[str, int]:
    def at(offset: int, size: int) -> bytes:
        file.seek(offset)
        return file.read(size)

    def rows(kind: struct.Struct, offset: int, count: int) -> list[tuple[int, ...]]:
        return list(kind.iter_unpack(at(offset, kind.size * count)))

    magic, type_, _, _, _, segments_at, sections_at, _, _, _, segments, _, count, _ = _HEADER.unpack(
        at(0, _HEADER.size)
    )
    if magic != b"\x7fELF":
        return {}
    base = 0
    if type_ == _MOVABLE:
        base = start - next(row[3] - row[2] for row in rows(_SEGMENT, segments_at, segments) if row[0] == _LOADED)
    sections = rows(_SECTION, sections_at, count)
    found: dict[str, int] = {}
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind == _DYNAMIC_SYMBOLS:
            texts = at(*sections[link][4:6])
            for name_at, _, _, section, value, _ in rows(_SYMBOL, offset, size // _SYMBOL.size):
                name = texts[name_at : texts.find(b"\0", name_at)].decode(errors="replace")
                if section and name in names:
                    found[name] = base + value
    return found
