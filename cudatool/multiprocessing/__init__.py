"""Arrays and events through the queues and pipes of :mod:`multiprocessing`, used by the receiver where they lie.

Importing it is enough, in the process that sends; start processes by ``multiprocessing.get_context("spawn")``. It can
also take the place of :mod:`multiprocessing`, whose names it has, as :mod:`torch.multiprocessing` does.
"""

import multiprocessing
from typing import Any

from cudatool.multiprocessing._reductions import init_reductions

__all__ = ["init_reductions"]

init_reductions()


def __getattr__(name: str) -> Any:
    return getattr(multiprocessing, name)
