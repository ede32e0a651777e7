"""The notes that child processes leave for the recorded program, which lists them in its trace.

They are lines in an in-memory file that the first process holds open and that ends with it. Each is appended by one
write.
"""

from __future__ import annotations

import errno
import os
from typing import Final, NamedTuple

__all__ = [
    "BEGAN",
    "ENDED",
    "IMPORTED",
    "REPLACED",
    "STARTED",
    "TRACED",
    "UNRECORDED",
    "Note",
    "ProcessJournal",
    "identity_of",
]

BEGAN: Final = "began"
"""Recording will begin in the process when it comes to use a device. The text is empty."""
ENDED: Final = "ended"
"""The process did not succeed, says `by`, which waited for it. The text is its exit status; if negative, the signal."""
IMPORTED: Final = "imported"
"""The process ended without a use of a device that was recorded, and had imported a library that may use one. The text
is its name."""
STARTED: Final = "started"
"""The process was started by `by`. The text is the program's name."""
REPLACED: Final = "replaced"
"""Another program is about to take the place of the process (exec). The text is its name."""
TRACED: Final = "traced"
"""The process has used the device. The text is the name of its trace."""
UNRECORDED: Final = "unrecorded"
"""The process uses a device, and is not recorded. The text says why."""

_MOST_TEXT = 500


class Note(NamedTuple):
    """What a process notes of the process `pid`: one of the words above, its text, and the process that notes it."""

    what: str
    pid: int
    by: int
    text: str


class ProcessJournal:
    """Where processes note how they start and end.

    Parameters
    ----------
    path, identity
        The file, and what distinguishes it from another file that may be at this path by now.
    """

    def __init__(self, path: str, identity: str) -> None:
        self.path, self.identity = path, identity

    def note(self, what: str, pid: int, text: str = "") -> None:
        """Append a note; do nothing once the first process has ended."""
        descriptor = self._open(os.O_WRONLY | os.O_APPEND)
        if descriptor is not None:
            line = f"{what}\t{pid}\t{os.getpid()}\t{' '.join(text.split())[:_MOST_TEXT]}\n"
            try:
                _write(descriptor, line.encode("utf-8", "backslashreplace"))
            finally:
                os.close(descriptor)

    def notes(self) -> list[Note]:
        """Return all notes so far."""
        descriptor = self._open(os.O_RDONLY)
        if descriptor is None:
            return []
        with open(descriptor, encoding="utf-8", errors="replace", newline="\n") as file:
            rows = [line.rstrip("\n").split("\t", 3) for line in file]
        return [Note(row[0], int(row[1]), int(row[2]), row[3]) for row in rows if len(row) == 4]

    def _open(self, mode: int) -> int | None:
        try:
            descriptor = os.open(self.path, mode | os.O_CLOEXEC)
        except OSError:
            return None
        if identity_of(descriptor) == self.identity:
            return descriptor
        os.close(descriptor)
        return None


def _write(descriptor: int, line: bytes) -> None:
    try:
        os.write(descriptor, line)
    except OSError as error:
        if error.errno != errno.EFBIG:
            return  # no memory: the process then counts as not recorded
        # The program has limited the size of its files. The limit is not meant for this one.
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
        try:
            os.write(descriptor, line)
        except OSError:
            pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def identity_of(descriptor: int) -> str:
    """Return what distinguishes an open file from all others."""
    found = os.fstat(descriptor)
    return f"{found.st_dev}:{found.st_ino}"
