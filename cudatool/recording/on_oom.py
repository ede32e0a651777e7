"""A report when memory runs out: the first failed allocation of a process is explained while its facts are at hand.

::

    the program's thread                   a thread of ours                        a process of ours
    --------------------                   ----------------                        -----------------
    a request fails: OomReport.__call__ -> the trace so far is brought up to date
    waits                                  python -m cudatool oom TRACE ---------> reads, replays, prints
                                           writes NAME.oom.txt <------------------
    the error is raised

The explanation comes from another process, so that it takes no memory of the program's, ends when its time is over, and
cannot change what the program does next. What goes wrong on the way is said in one line, and never reaches the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cudatool.collect.library_failures import LibraryFailures
from cudatool.collect.torch_failures import TorchFailures
from cudatool.config import CHILD
from cudatool.errors import CudatoolError
from cudatool.files import write_whole
from cudatool.memory import observers
from cudatool.progress import announce
from cudatool.text import printable

__all__ = ["REPORT", "OomReport", "explained_by"]

REPORT: Final = ".oom.txt"
"""Ending of a report's name, in the place of the trace's."""
_BUDGET_S: Final = 0.7  # processor time for other settings: at 100,000 events, the whole report takes 1 s
_LONGEST_S: Final = 60.0  # that the program waits, whatever the length of the recording


class OomReport:
    """Writes the report of this process, once.

    Parameters
    ----------
    recording
        Returns the file that has what happened so far, brought up to date; None if there is none. It is called once,
        on a thread of its own.
    snapshot
        Returns the name of a file for PyTorch's own snapshot, where `recording` does not have PyTorch's memory.
    history_share
        Let PyTorch keep the history of its allocator for that, at this share of the program's time; 0 for none.
    """

    def __init__(
        self,
        recording: Callable[[], str | None],
        *,
        snapshot: Callable[[], str] | None = None,
        history_share: float = 0.0,
    ) -> None:
        self._recording, self._snapshot = recording, snapshot
        self._torch = TorchFailures(self._of_torch, history_share=0.0 if snapshot is None else history_share)
        self._others = LibraryFailures(self)
        self._process = os.getpid()
        self._once = threading.Lock()  # taken for good by the first failure

    def start(self) -> None:
        """Wait for the first failure."""
        observers.add(self)
        self._torch.start()
        self._others.start()

    def stop(self) -> None:
        """Wait no longer. Stopping again changes nothing."""
        observers.remove(self)
        self._torch.stop()
        self._others.stop()

    def __call__(self, device: int, wanted: int, allowed: int, free: int) -> None:
        """Write the report, unless there is one; returns when it is written. It does not matter what failed."""
        self._fail(self._recording)

    def _of_torch(self, device: int, wanted: int, allowed: int, free: int) -> None:
        self._fail(self._recording if self._snapshot is None else self._dumped)

    def _dumped(self) -> str:
        assert self._snapshot is not None
        path = self._snapshot()
        self._torch.dump(path)
        return path

    def _fail(self, recording: Callable[[], str | None]) -> None:
        if os.getpid() != self._process or not self._once.acquire(blocking=False):
            return
        worker = threading.Thread(
            target=self._write, args=(recording,), name="cudatool out-of-memory report", daemon=True
        )
        try:
            worker.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            announce("cudatool: memory ran out; there is no report, since no thread could be started")
            return
        worker.join()  # what a signal handler of the program raises while it waits is the program's

    def _write(self, recording: Callable[[], str | None]) -> None:
        """Run on the thread of the report: nothing that happens here may reach the program."""
        trace: str | None = None
        try:
            trace = recording()
            if trace is None:
                return
            path = os.path.splitext(trace)[0] + REPORT
            write_whole(path, _explained(trace))
        except Exception as error:  # PyTorch's too, which is asked for a snapshot in the middle of a failure
            then = f"; cudatool oom {trace} explains it" if trace else ""
            why = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
            announce(printable(f"cudatool: memory ran out; its report could not be written ({why}){then}"))
        else:
            announce(printable(f"cudatool: memory ran out: {path} says what held it"))


@contextmanager
def explained_by(report: OomReport) -> Iterator[None]:
    """Wait for the first failure inside of the ``with`` block."""
    report.start()
    try:
        yield
    finally:
        report.stop()


def _explained(trace: str) -> str:
    """Return the text of the report.

    Raises
    ------
    OSError, subprocess.SubprocessError
        The other process could not be started, or took too long.
    CudatoolError
        It could not explain the failure.
    """
    if not sys.executable:
        raise CudatoolError("this Python has no executable to run")
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    # -P: modules that lie in the program's directory are not ours.
    command = [sys.executable, "-P", "-m", "cudatool", "oom", "--budget", str(_BUDGET_S), trace]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_LONGEST_S,
        env=environment | {"COLUMNS": "120", "NO_COLOR": "1"},
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise CudatoolError(said[-1] if said else f"the report's process ended with status {done.returncode}")
    return done.stdout.decode(errors="replace")


_NOT_PASSED_ON: Final = (CHILD, "PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "FORCE_COLOR")
