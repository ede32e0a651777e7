"""Every error that cudatool raises, as one tree.

::

    CudatoolError
    ├── UsageError                 an argument, option or setting is wrong
    │   ├── ShapeError             shapes do not fit (also a ValueError)
    │   └── ConfigError            a setting string or environment variable cannot be read (also a ValueError)
    ├── DeviceUnavailableError     the device asked for does not exist on this machine
    ├── CudaError                  a CUDA driver call failed; ``.name`` is the CUDA error's name (also a RuntimeError)
    │   └── OutOfMemoryError       no memory could be had even after cached blocks were given back
    ├── MissingImplementationError an operation has no implementation for this kind of device
    ├── SynchronizationError       a hidden synchronization, while set_sync_debug_mode("error") (also a RuntimeError)
    ├── GraphBreakError            a function cannot be one graph; ``.line`` says where (also a RuntimeError)
    ├── CompileError               NVRTC refused a kernel; ``.log`` is what it said
    ├── FileFormatError            a file is not what it should be; ``.path`` names it
    │   ├── TraceFormatError       not a cudatool trace, or of an unknown version
    │   └── SnapshotFormatError    not a PyTorch memory snapshot, or an unsafe one
    ├── OutputError                a result could not be written
    └── PtxError                   a text is not PTX; in :mod:`cudatool.ptx.model`
        └── LinkError              modules cannot be linked; in :mod:`cudatool.ptx.linker`

The command line prints any of them as one line and exits with status 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cudatool.text import QUOTED, quoted

__all__ = [
    "CudatoolError",
    "UsageError",
    "ShapeError",
    "ConfigError",
    "DeviceUnavailableError",
    "CudaError",
    "OutOfMemoryError",
    "MissingImplementationError",
    "SynchronizationError",
    "GraphBreakError",
    "CompileError",
    "FileFormatError",
    "TraceFormatError",
    "SnapshotFormatError",
    "OutputError",
    "did_you_mean",
    "names_given",
    "unknown",
]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'train.py'?`` if one of the known words is near to a word, else nothing."""
    import difflib

    close = difflib.get_close_matches(word[:QUOTED], list(known), n=1)
    return f"did you mean {quoted(close[0])}?" if close else ""


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return ``there is no check 'rase'; did you mean 'race'?``, or what there is if nothing is near."""
    names = list(known)
    return f"there is no {what} {quoted(word)}; {did_you_mean(word, names) or 'there are ' + ', '.join(names)}"


class CudatoolError(Exception):
    """Base of every error raised by cudatool."""


class UsageError(CudatoolError):
    """An argument, option or setting is wrong."""


def names_given(what: str, given: str | Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a text such as ``"race, leak"``, or a list of texts, gives, in the order of `known`.

    Raises
    ------
    UsageError
        One is not known, or `given` is something else.
    """
    try:
        names = {name.strip() for name in (given.split(",") if isinstance(given, str) else given)} - {""}
    except (TypeError, AttributeError):
        raise UsageError(f"a {what} is named by a text, such as {known[0]!r}, not by {given!r}") from None
    if strange := sorted(names.difference(known)):
        raise UsageError(unknown(what, strange[0], known))
    return tuple(name for name in known if name in names)


class ShapeError(UsageError, ValueError):
    """Shapes do not fit."""


class ConfigError(UsageError, ValueError):
    """A setting string or environment variable cannot be read."""


class DeviceUnavailableError(CudatoolError):
    """The device asked for does not exist on this machine."""


class CudaError(CudatoolError, RuntimeError):
    """A CUDA driver call failed.

    Parameters
    ----------
    message
        What happened and what to do about it.
    name
        The CUDA error's name, for example ``"CUDA_ERROR_INVALID_VALUE"``.
    """

    def __init__(self, message: str, name: str = "CUDA_ERROR_UNKNOWN") -> None:
        super().__init__(message, name)  # both in args, so that the error survives pickling
        self.name = name

    def __str__(self) -> str:
        return f"{self.name}: {self.args[0]}"


class OutOfMemoryError(CudaError):
    """No device memory could be had, even after cached blocks were given back.

    Attributes
    ----------
    wanted, allowed, total, free, allocated, reserved
        Bytes, 0 where not known: of the segment that was asked for; that may be
        reserved; of the device; of the device that are free; in use by the program; held by the allocator.
    """

    wanted = allowed = total = free = allocated = reserved = 0

    def __init__(self, message: str, name: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        super().__init__(message, name)


class MissingImplementationError(CudatoolError, NotImplementedError):
    """An operation has no implementation for the kind of device that the process uses.

    Parameters
    ----------
    op
        The operation's name.
    kind
        The kind of device: ``"cuda"`` or ``"sim"``.
    kinds
        Those that it is implemented for.
    """

    def __init__(self, op: str, kind: str, kinds: tuple[str, ...]) -> None:
        super().__init__(op, kind, kinds)
        self.op = op
        self.kind = kind
        self.kinds = kinds

    def __str__(self) -> str:
        there = f"there is one for {' and '.join(self.kinds)}" if self.kinds else "there is none at all"
        return (
            f"{self.op} has no implementation for {self.kind} devices; {there}; "
            f"register one with @cudatool.ops.op({self.op!r}).implementation({self.kind!r})"
        )


class SynchronizationError(CudatoolError, RuntimeError):
    """The program would have waited for the device without having said so (:func:`cudatool.set_sync_debug_mode`)."""


class GraphBreakError(CudatoolError, RuntimeError):
    """A function does something that :func:`cudatool.compiler.compile` cannot put into a graph.

    Parameters
    ----------
    reason
        What it does.
    line
        Where, as ``file.py:12``; empty if no single line does it.
    """

    def __init__(self, reason: str, line: str = "") -> None:
        super().__init__(reason, line)
        self.reason = reason
        self.line = line

    def __str__(self) -> str:
        return f"{self.line}: {self.reason}" if self.line else self.reason


class CompileError(CudatoolError):
    """NVRTC refused a kernel's source.

    Parameters
    ----------
    message
        One line that says which program failed.
    log
        NVRTC's own messages, with file names and line numbers.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message, log)
        self.log = log

    def __str__(self) -> str:
        message: str = self.args[0]
        return f"{message}\n{self.log}" if self.log else message


class FileFormatError(CudatoolError):
    """A file is not what it should be.

    Parameters
    ----------
    path
        The file.
    reason
        What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class TraceFormatError(FileFormatError):
    """Not a cudatool trace, or one of an unknown version."""


class SnapshotFormatError(FileFormatError):
    """Not a PyTorch memory snapshot, or one that would run code when loaded."""


class OutputError(CudatoolError):
    """A result could not be written."""
