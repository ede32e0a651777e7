"""Runs the workload in a separate process, so that a report is written however it ends.

A program may exit by os._exit, replace itself with another one, or be killed: then its own process cannot report. So it
runs in a fork of the command, which writes the report if the program ends normally. If it does not, the parent, which
otherwise only waits, takes over.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from cudatool.files import KeptDescriptor

__all__ = ["Supervised", "leave"]

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80  # sent by the kernel, as by a terminal to its whole foreground group
_reporting: Supervised | None = None  # in the child, once the workload has ended
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Supervised:
    """Forks when it is made; the parent waits for the child, in which :attr:`status` is None.

    Parameters
    ----------
    clean_up
        What the parent does before it ends as the child did.

    Attributes
    ----------
    status
        In the parent: the exit status of a workload that did not end normally; if negative, the signal that ended it.

    :meth:`came_to_its_end` in the child: the child will report, and the parent never returns from here.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        self.status: int | None = None
        read, write = os.pipe()
        self._write = KeptDescriptor(write)
        self._process = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGCHLD))
        child = os.fork()
        if not child:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(read)
            self._process = os.getpid()
            return
        self._write.close()
        status = os.waitstatus_to_exitcode(_wait(child))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.set_blocking(read, False)
        try:
            said = os.read(read, 2)
        except BlockingIOError:  # a process that outlives the workload has the other end
            said = b""
        os.close(read)
        if not said:
            self.status = status
            return
        clean_up()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        else:
            # The child has written everything. A finalizer of the workload's may have changed its exit status since.
            os._exit((said[1] if len(said) > 1 else 0) or status)

    def came_to_its_end(self) -> bool:
        """Note in the child that the workload has ended. Does nothing in a process that the workload forked.

        Return False if the workload closed the pipe to the parent, which then reports.
        """
        global _reporting
        if not self._say(b"."):
            return False
        _reporting = self
        return True

    def _say(self, byte: bytes) -> bool:
        number = self._write.number
        if os.getpid() != self._process or number is None:
            return False
        os.write(number, byte)
        return True


def leave(status: int) -> NoReturn:
    """Exit with this status, whatever the workload's finalizers do when the interpreter ends."""
    if _reporting is not None:
        _reporting._say(bytes([status]))
    sys.exit(status)


def _wait(child: int) -> int:
    """Wait for the child, pass on the signals that only this process got, and return its wait status."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        found = signal.sigwaitinfo((*_FORWARDED, signal.SIGCHLD))
        if found.si_signo != signal.SIGCHLD and found.si_code != _SI_KERNEL:
            os.kill(child, found.si_signo)
