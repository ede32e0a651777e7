"""Files: an input is a regular one; a result is written whole or not at all, and is never an input.

That a result can be written is known before the work.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

from cudatool.errors import OutputError, UsageError, did_you_mean

__all__ = [
    "KeptDescriptor",
    "check_outputs",
    "check_writable",
    "near_name",
    "open_input",
    "open_standard_files",
    "read_input",
    "replacing",
    "temporary_name",
    "with_high_number",
    "write_whole",
]

_FIRST_KEPT: Final = 512  # half of the descriptors that a process may usually have
_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_input(path: str | os.PathLike[str], *, buffered: bool = True) -> BinaryIO:
    """Open a file that a user named, for reading. A pipe could block forever, and a device never end.

    If it is not `buffered`, nothing is read ahead, and a read may give less than there is.

    Raises
    ------
    OSError
        It cannot be read, or it is no regular file; ``strerror`` says what it is.
    """
    return open(path, "rb", -1 if buffered else 0, opener=_open_regular)


def read_input(path: str | os.PathLike[str], most: int) -> bytes:
    """Return what a file that a user named holds, which is at most `most` bytes.

    Raises
    ------
    OSError
        As :func:`open_input`, or it is larger.
    """
    with open_input(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        limit = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise OSError(errno.EFBIG, f"it is larger than {limit}", os.fspath(path))
    return content


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a writer does not block
    found = os.fstat(descriptor)
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFREG and (found.st_size or _is_empty(descriptor)):
        return descriptor
    os.close(descriptor)
    what = "a file that the kernel makes" if kind == stat.S_IFREG else _KINDS.get(kind, "not a file")
    raise OSError(errno.EINVAL, f"it is {what}", path)


def _is_empty(descriptor: int) -> bool:
    """Whether a file of no bytes has none: files in /proc have some, which may never end, or be waited for."""
    try:
        return not os.read(descriptor, 1)
    except OSError:
        return False


def check_outputs(
    outputs: Iterable[str | os.PathLike[str]], inputs: Iterable[str | os.PathLike[str]] = (), *, force: bool = True
) -> None:
    """Complain if `outputs` cannot be written, or if one is one of `inputs` or another of `outputs`.

    Files are the same if they are one file, whatever their names: symbolic and hard links count. A device or a pipe,
    such as ``/dev/null``, holds nothing that could be lost. Changes nothing.

    Parameters
    ----------
    force
        Without it, no output may exist yet. With it, an input is still no output.

    Raises
    ------
    UsageError
        Writing one would lose an input, another output or, without `force`, a file that exists.
    OutputError
        One cannot be written.
    """
    read = {_identity(path): os.fspath(path) for path in inputs}
    written: dict[object, str] = {}
    for output in outputs:
        path = os.fspath(output)
        identity = _identity(path)
        if identity is not None:
            if identity in read:
                also = "" if read[identity] == path else f", which is {read[identity]}"
                raise UsageError(f"cannot write {path}{also}: this command reads that file; name another")
            if identity in written:
                raise UsageError(f"two results cannot go to the same file: {written[identity]} and {path}")
            written[identity] = path
            if not force and os.path.lexists(path):
                raise UsageError(f"{path} exists; add -f to overwrite it, or name another file")
        check_writable(path)


def near_name(path: str | os.PathLike[str], endings: tuple[str, ...]) -> str:
    """Return ``did you mean 'train.py'?`` for a file that is not there, nothing if no file beside it is like it."""
    text = os.fspath(path)
    folder = os.path.dirname(text)
    try:
        beside = [os.path.join(folder, name) for name in os.listdir(folder or os.curdir) if name.endswith(endings)]
    except OSError:
        return ""
    stem = os.path.splitext(text)[0]  # the ending alone makes no two names alike
    alike = [name for name in beside if name.startswith(stem) or did_you_mean(stem, [os.path.splitext(name)[0]])]
    return did_you_mean(text, alike)


def open_standard_files() -> None:
    """Put the null device where stdin, stdout or stderr is closed: no file of ours shall get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def with_high_number(descriptor: int) -> int:
    """Move an open descriptor out of the way: programs close low numbers, and count on the ones that they get next."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_KEPT)
    except OSError:
        return descriptor  # the process may not have that many
    os.close(descriptor)
    return moved


class KeptDescriptor:
    """A descriptor of ours in the process of a program, which may close any descriptor and reuse its number.

    Parameters
    ----------
    descriptor
        An open one, which this takes over.
    """

    def __init__(self, descriptor: int) -> None:
        self._number = with_high_number(descriptor)
        self.identity = self._found()
        """What tells its file from all others."""

    @property
    def number(self) -> int | None:
        """The descriptor, None if the program has closed it: the number may be another file's by now."""
        return self._number if self._found() == self.identity else None

    def close(self) -> None:
        """Close it, unless the program did. Closing again changes nothing."""
        if self._number >= 0 and self.number is not None:
            os.close(self._number)
        self._number = -1

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self._number)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _identity(path: str | os.PathLike[str]) -> object:
    """Return what two names of one file have in common, None for what is no regular file."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)  # it is not there yet
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def check_writable(path: str) -> None:
    """Raise :class:`OutputError` if :func:`replacing` could not write `path`; changes nothing."""
    if os.path.isdir(path):
        raise OutputError(f"cannot write {path}: it is a directory")
    temporary = temporary_name(path)
    try:
        if _is_pipe(path):  # to open and close it would be the end of the file for who reads it
            if not os.access(path, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        elif _is_special(path):
            open(path, "ab", opener=_open_at_once).close()
        else:
            open(temporary, "xb").close()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {_why(path, error)}") from error
    finally:
        _remove(temporary)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Name the file to write, which takes the place of `path` when the block ends; a device or pipe is written itself.

    A pipe must have a reader by now: to wait for one could take forever.

    Raises
    ------
    OutputError
        It could not be written, and what was there before still is.
    """
    path = os.fspath(path)
    temporary = temporary_name(path)
    try:
        if _is_special(path):
            with open(path, "ab", opener=_open_at_once):  # as long as this is open, to open it again does not wait
                yield path
        else:
            yield temporary
            os.replace(temporary, os.path.realpath(path))  # through a link to the file that it names
    except OSError as error:
        raise OutputError(f"cannot write {path}: {_why(path, error)}") from error
    finally:
        _remove(temporary)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file with `text` in UTF-8; see :func:`replacing`."""
    with replacing(path) as name, open(name, "wb") as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))
        if name != os.fspath(path):
            file.flush()
            os.fsync(file.fileno())


def _why(path: str, error: OSError) -> str:
    folder = os.path.dirname(path) or os.curdir
    return str(error.strerror or error) if os.path.isdir(folder) else "its directory does not exist"


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # it was never there


def temporary_name(path: str) -> str:
    """Return a name beside `path` for a file that is going to take its place.

    It cannot be guessed: in a folder where others may write, too, a link of that name would lead to another file.
    """
    return f"{os.path.realpath(path)}.{os.urandom(6).hex()}.tmp"


def _open_at_once(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO and _is_pipe(path):
            raise OSError(error.errno, "it is a pipe that no process reads", path) from error
        raise


def _is_special(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False
