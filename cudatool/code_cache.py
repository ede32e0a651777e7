"""Compiled code, kept between processes: where it is kept, who may have put it there, and how much is kept.

What is taken from here is run, so no other user may put anything here. Folders and files are opened first and
asked then whose they are, through their descriptors: nothing can take their place in between.

- A folder belongs to this process's user, no one else can write to it, and it is no symbolic link. Those made here have
  mode 0700. A folder that is refused is named once on stderr, and no code is kept.
- A file belongs to this process's user, too, and begins with a digest of its name and contents. One that was cut short
  or changed counts as none, and is written again.
- Files are written under another name and renamed: another process sees a whole file or none.
- If there is more than ``CUDATOOL_CACHE_SIZE`` (by default 1 GiB; 0 keeps nothing), what was not used for longest goes:
  of files with names of ours, in folders of ours.

The folder is ``CUDATOOL_CACHE_DIR``; else ``cudatool`` in ``XDG_CACHE_HOME``, else in ``~/.cache``; and if that cannot
be written, as in a container whose user has no home, ``cudatool-UID`` in the directory for temporary files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from cudatool.config import CACHE_DIR, CACHE_SIZE
from cudatool.errors import ConfigError
from cudatool.progress import announce
from cudatool.units import parse_bytes

__all__ = ["CodeCache", "size_limit"]

_DIGEST: Final = 32  # bytes of it
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe does not block
_COMPILERS: Final = ("native", "nvrtc", "torch", "triton", "ptx", "cupy")  # each has a folder
_ENDING: Final = ".code"  # of the names of our files: the folder may be one that has others, and only ours are removed
_UNFINISHED: Final = ".code.new"  # while a file is written
_ABANDONED_S: Final = 3600  # an unfinished file of this age is of a process that was killed
_LOOK_AGAIN: Final = 64  # look how much there is whenever a process has written this part of the limit
_LOOKED_S: Final = 60  # and at its first file, unless another process has looked so recently: full, it takes 0.7 s
_KEPT: Final = 7 / 8  # of the limit, when something has to go

_said: set[str] = set()  # folders that were refused


def size_limit() -> int:
    """Return how many bytes are kept in all (``CUDATOOL_CACHE_SIZE``).

    Raises
    ------
    ConfigError
        The setting is no size.
    """
    try:
        return parse_bytes(CACHE_SIZE.value())
    except ConfigError as error:
        raise ConfigError(f"{CACHE_SIZE.name}: {error}") from None


class CodeCache:
    """What one compiler made, by key.

    Parameters
    ----------
    compiler
        The folder's name.
    """

    def __init__(self, compiler: str) -> None:
        assert compiler in _COMPILERS
        self._compiler = compiler
        self._unseen = 0  # bytes written since this process looked how much there is
        self._has_looked = False

    def get(self, key: str) -> bytes | None:
        """Return what is kept under `key`, or None. It counts as used now."""
        folder = self._open()
        if folder is None:
            return None
        try:
            file = os.open(key + _ENDING, _FILE, dir_fd=folder)
        except OSError:
            return None
        finally:
            os.close(folder)
        with open(file, "rb") as content:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or not _is_ours(found) or found.st_size > size_limit():
                return None
            try:
                digest, data = content.read(_DIGEST), content.read(found.st_size)
                os.utime(file)
            except OSError:
                return None
        return data if digest == self._digest(key, data) else None

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`. If it cannot be kept, it is not: that is no error.

        Raises
        ------
        ConfigError
            ``CUDATOOL_CACHE_SIZE`` is no size.
        """
        limit, size = size_limit(), _DIGEST + len(data)
        if size > limit:
            return
        folder = self._open()
        if folder is None:
            return
        unfinished = f"{os.urandom(8).hex()}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
                file.write(self._digest(key, data) + data)
            os.rename(unfinished, key + _ENDING, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:  # a full disk
            _remove(unfinished, folder)
            return
        finally:
            os.close(folder)
        self._unseen += size
        if self._unseen > limit / _LOOK_AGAIN or not (self._has_looked or _was_looked_at()):
            self._unseen = 0
            _evict(limit)
        self._has_looked = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes and threads that ask for this out of the ``with`` block.

        Of many that compile the same at once, as the ranks of one job do, the first compiles, and the others find it
        kept. Where nothing can be kept or locked, all compile.
        """
        folder = self._open()
        if folder is None:
            yield
            return
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(folder)

    def folder(self) -> str | None:
        """Return the path of the compiler's folder, for files that this class does not keep; None if there is none."""
        found = _open_root()
        if found is None:
            return None
        root, path = found
        os.close(root)
        folder = self._open()
        if folder is None:
            return None
        os.close(folder)
        return os.path.join(path, self._compiler)

    def _digest(self, key: str, data: bytes) -> bytes:
        return hashlib.sha256(f"{self._compiler}/{key}\n".encode() + data).digest()

    def _open(self) -> int | None:
        """Return a descriptor of the compiler's folder; None if nothing can be kept."""
        found = _open_root()
        if found is None:
            return None
        root, path = found
        try:
            return _open_folder(self._compiler, root, shown=os.path.join(path, self._compiler))
        except OSError:
            return None
        finally:
            os.close(root)


class _RefusedError(OSError):
    """Others could have put something into the folder. It was said."""


def _open_root() -> tuple[int, str] | None:
    """Return a descriptor of the folder of all compilers, and its path; None if nothing can be kept."""
    for path in _paths():
        try:
            _make_parents(path)
            folder = _open_folder(path, shown=path)
        except _RefusedError:
            return None
        except OSError:
            continue
        if os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
            return folder, path
        os.close(folder)
    return None


def _paths() -> Iterator[str]:
    """Yield where the folder may be, best first."""
    if chosen := CACHE_DIR.given():
        yield os.path.abspath(chosen)
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # else the user's home is not known
        yield os.path.join(home, "cudatool")
    import tempfile  # takes a while to load, and few users have no home

    yield os.path.join(tempfile.gettempdir(), f"cudatool-{os.geteuid()}")


def _make_parents(path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_parents(parent)
        try:
            os.mkdir(parent, 0o700)
        except FileExistsError:  # another process was as quick
            pass


def _open_folder(name: str, within: int | None = None, *, shown: str) -> int:
    """Return a descriptor of a folder, which is made if it is not there.

    Parameters
    ----------
    name, within
        Its name in a folder, or its path.
    shown
        What it is called in messages.

    Raises
    ------
    _RefusedError
        It is a link, is another user's, or others can write to it.
    OSError
        It cannot be made or opened.
    """
    try:
        os.mkdir(name, 0o700, dir_fd=within)
    except FileExistsError:
        pass
    try:
        folder = os.open(name, _FOLDER, dir_fd=within)
    except OSError:
        if stat.S_ISLNK(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode):
            _refuse(shown, f"it is a symbolic link; name the folder itself in {CACHE_DIR.name}")
        raise
    found = os.fstat(folder)
    if _is_ours(found):
        return folder
    os.close(folder)
    if found.st_uid != os.geteuid():
        _refuse(shown, f"it belongs to user {found.st_uid}; name a folder of your own in {CACHE_DIR.name}")
    import shlex  # few folders are refused

    _refuse(shown, f"others can write to it; delete it, or run chmod -R go-w {shlex.quote(shown)} if you trust them")


def _is_ours(found: os.stat_result) -> bool:
    """Whether no other user can have written what was opened."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _refuse(path: str, why: str) -> NoReturn:
    if path not in _said:
        _said.add(path)
        announce(f"cudatool: compiled code is not kept in {path}: {why}")
    raise _RefusedError(path)


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:  # another process did
        pass


# ---- how much is kept ----


def _was_looked_at() -> bool:
    """Whether a process has just looked how much there is; the folder of all compilers was changed then."""
    opened = _open_root()
    if opened is None:
        return True
    root, _ = opened
    try:
        return 0 <= time.time() - os.fstat(root).st_mtime < _LOOKED_S
    finally:
        os.close(root)


def _evict(limit: int) -> None:
    """Remove what was not used for longest, if there is more than the limit. Other processes may do so, too."""
    opened = _open_root()
    if opened is None:
        return
    root, path = opened
    folders: list[int] = []
    try:
        os.utime(root)
        for compiler in sorted(set(os.listdir(root)).intersection(_COMPILERS)):
            try:
                folders.append(_open_folder(compiler, root, shown=os.path.join(path, compiler)))
            except OSError:
                continue
        files = sorted(file for folder in folders for file in _files(folder))
        total = sum(size for _, size, _, _ in files)
        if total <= limit:
            return
        for _, size, name, folder in files:
            if total <= limit * _KEPT:
                return
            _remove(name, folder)
            total -= size
    finally:
        for descriptor in (root, *folders):
            os.close(descriptor)


def _files(folder: int) -> Iterator[tuple[int, int, str, int]]:
    """Yield time of last use (ns), size, name and folder of each file; removes what was never finished."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if entry.name.endswith(_UNFINISHED) and time.time() - found.st_mtime > _ABANDONED_S:
                _remove(entry.name, folder)
            elif entry.name.endswith(_ENDING) and stat.S_ISREG(found.st_mode):
                yield found.st_mtime_ns, found.st_size, entry.name, folder
