"""A forked child of the tests' own process, which ends whatever happens in it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

__all__ = ["status_of"]

_LONGEST_S = 60


def status_of(work: Callable[[], int]) -> int:
    """Fork a child that does `work` and exits with what that returns; return its exit status.

    A child that raises an exception ends with 99, rather than going on with the tests as a second pytest; one that waits
    (for a lock that another thread held at the fork, for example) is ended by SIGALRM, and the status is -14.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LONGEST_S)
            os._exit(work())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
