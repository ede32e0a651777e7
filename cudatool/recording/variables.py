"""The variables of the program that runs in this process."""

from __future__ import annotations

import sys

__all__ = ["drop"]


def drop() -> None:
    """Drop the program's own variables, as the end of the interpreter does, so that what is left has leaked."""
    import gc

    main = sys.modules.get("__main__")
    if main is not None:
        main.__dict__.clear()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        # A spawned process keeps the function that it ran, and with it a second table of the main module's names.
        vars(processes.current_process()).update(_target=None, _args=(), _kwargs={})
    gc.collect()
