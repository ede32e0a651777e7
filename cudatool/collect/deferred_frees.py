"""Frees that a library defers: memory that the program has released but that looks like a leak until it is freed."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["carry_out"]

_NUMBA = "numba.cuda.cudadrv"  # also where numba-cuda is installed


def carry_out() -> None:
    """Let numba free what the program has released.

    numba frees arrays once their memory reaches a limit (``NUMBA_CUDA_MAX_PENDING_DEALLOCS_COUNT`` and ``_RATIO``),
    but never the arrays that are released after the last such moment. A library that the program did not import is left
    alone.
    """
    driver, devices = (sys.modules.get(f"{_NUMBA}.{name}") for name in ("driver", "devices"))
    if not getattr(getattr(driver, "driver", None), "is_initialized", False):
        return  # asking for its devices would initialize it
    for gpu in getattr(devices, "gpus", ()):
        context = getattr(gpu, "primary_context", None)
        for owner in (getattr(context, "memory_manager", None), context):
            pending = getattr(owner, "deallocations", None)
            if pending is not None:
                with contextlib.suppress(Exception):  # numba's own error: a kernel faulted, nothing can be freed
                    pending.clear()
