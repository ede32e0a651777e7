"""A recording that is being watched: its trace, followed and folded into what it holds now."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from cudatool.analyze.live import LiveState
from cudatool.analyze.live_rows import LivePicture
from cudatool.errors import CudatoolError, UsageError
from cudatool.trace.follow import Follower
from cudatool.trace.model import Ending
from cudatool.trace.reader import is_trace
from cudatool.workload import Start, Workload

__all__ = ["Started", "Watched", "start", "trace_of_process"]

_APPEARS_S: Final = 0.05  # between two looks for a file that is not there yet
_SAME_CLOCK_NS: Final = 60 * 10**9  # the clock of the world may be set during the recording
_LAST_LINES: Final = 20  # of the output of a program that ended before it was recorded


class Watched:
    """Follows a trace. What takes its place under the same name is followed in turn, from its beginning.

    Attributes
    ----------
    path
        Of the trace.
    state
        What the events so far lead to.
    replaced
        How often another recording took the place of the one before.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.state = LiveState()
        self.replaced = 0
        self.is_behind = True  # whether more events were there after the last look
        self._follower = Follower(self.path)

    def close(self) -> None:
        """Close the trace."""
        self._follower.close()

    @property
    def ending(self) -> Ending:
        """How the recording ended; ``GROWING`` as long as it goes on."""
        return self._follower.ending

    @property
    def tables(self) -> Follower:
        """What names and stacks stand for."""
        return self._follower

    @property
    def device(self) -> str:
        """The device's description."""
        return str(self._follower.header.get("device", ""))

    @property
    def is_simulated(self) -> bool:
        """Whether times on the device come from the software device's cost model."""
        return self._follower.header.get("device_kind") == "sim"

    @property
    def damage(self) -> str:
        """What is wrong with the file, if anything."""
        return self._follower.damage

    def advance(self, most_s: float) -> None:
        """Take what is new, for at most about so many seconds."""
        until = time.monotonic() + most_s
        while True:
            records = self._follower.read()
            self.state.fold(records)
            self.is_behind = len(records) > 0
            if not self.is_behind:
                if self._follower.is_replaced:
                    self._follow_the_other()
                    continue
                break
            if time.monotonic() >= until:
                return
        if self.ending is Ending.GROWING and self.state.events and self._has_our_clock():
            self.state.go_on(time.monotonic_ns())

    def catch_up(self) -> None:
        """Take all that is there."""
        self.advance(1.0)
        while self.is_behind:
            self.advance(1.0)

    def picture(self, *, most: int = 20, sort: str = "bytes", search: str = "") -> LivePicture:
        """Return what there is now: see :meth:`LiveState.picture`."""
        header = self._follower.header
        totals, libraries = header.get("total_memory", ()), header.get("libraries", ())
        return self.state.picture(
            self._follower, most=most, sort=sort, search=search, totals=totals, libraries=libraries
        )

    def _has_our_clock(self) -> bool:
        """Return whether the events' clock is this machine's: the header has both clocks at one moment."""
        header = self._follower.header
        if "start_time_ns" not in header or "start_unix_ns" not in header:
            return False
        since = time.monotonic_ns() - header["start_time_ns"]
        return bool(abs(time.time_ns() - header["start_unix_ns"] - since) < _SAME_CLOCK_NS)

    def _follow_the_other(self) -> None:
        try:
            other = Follower(self.path)
        except UsageError:
            return  # it is gone again
        self._follower.close()
        self._follower, self.state = other, LiveState()
        self.replaced += 1


def trace_of_process(pid: int) -> str:
    """Return the trace that a process writes: the newest, if there are several.

    A recorder maps the end of its file, to write into it: the system says which files a process has mapped so.

    Raises
    ------
    UsageError
        There is no such process, it may not be looked at, or it does not record.
    """
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text("utf-8", "surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(f"there is no process {pid}") from None
    except PermissionError:
        raise UsageError(
            f"process {pid} may not be looked at: it is another user's, or the system forbids it; name its trace"
        ) from None
    found = set()
    for line in mapped.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] == "rw-s" and fields[5].endswith(".ctrace"):
            found.add(fields[5].replace("\\012", "\n"))
    there = [path for path in found if os.path.exists(path)]
    if not there:
        why = "its trace was removed" if found else "it does not record; start it with `cudatool run`"
        raise UsageError(f"process {pid} has no trace: {why}")
    return max(there, key=lambda path: os.stat(path).st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Started:
    """A program that is recorded in a process of its own.

    Attributes
    ----------
    process
        ``cudatool run`` with the program.
    trace, log
        The files with its events and with what it prints.
    """

    process: subprocess.Popen[bytes]
    trace: str
    log: str

    def wait_for_trace(self) -> None:
        """Wait until the program is recorded.

        Raises
        ------
        CudatoolError
            It ended before that; the message has the end of what it printed.
        """
        while not is_trace(self.trace):  # the recorder has written its beginning, and locked it
            if self.process.poll() is not None and not is_trace(self.trace):
                said = Path(self.log).read_text("utf-8", "replace").splitlines()[-_LAST_LINES:]
                raise CudatoolError("\n".join(["the program ended before it was recorded:", *said]))
            time.sleep(_APPEARS_S)


def start(words: Sequence[str], *, device: str | None, output: str | None, force: bool) -> Started:
    """Start ``cudatool run`` with a program; what that prints goes to a file beside its trace.

    The program has no input, and goes on if the view of it ends.

    Raises
    ------
    UsageError
        There is no such program, or one of the files exists.
    """
    program = Workload.parse(words, "live")
    program.check()
    if program.start is Start.STDIN:
        raise UsageError("live gives a program no input; name a file")
    trace = os.path.abspath(output or f"{program.name}.{os.getpid()}.ctrace")
    log = trace.removesuffix(".ctrace") + ".log"
    # -P: modules that lie in this directory are not ours.
    command = [sys.executable, "-P", "-m", "cudatool", "run", "-o", trace]
    command += ["--device", device] if device else []
    command += ["-f"] if force else []
    with _new_file(log, force) as out:
        process = subprocess.Popen(
            [*command, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    return Started(process, trace, log)


def _new_file(path: str, force: bool) -> IO[bytes]:
    try:
        return open(path, "wb" if force else "xb")
    except FileExistsError:
        raise UsageError(f"{path} exists; add -f to overwrite it, or name another trace with -o") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
