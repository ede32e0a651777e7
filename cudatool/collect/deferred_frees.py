"""Frees that a library has put off: memory that its program has given back, and that looks like a leak until then."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["carry_out"]

_NUMBA = "numba.cuda.cudadrv"  # also where numba-cuda is installed


def carry_out() -> None:
    """Let numba free what its program has given back.

    numba frees arrays when their memory has come to a limit (``NUMBA_CUDA_MAX_PENDING_DEALLOCS_COUNT`` and ``_RATIO``),
    and what was given back after that never. A library that the program did not import is left alone.
    """
    driver, devices = (sys.modules.get(f"{_NUMBA}.{name}") for name in ("driver", "devices"))
    if not getattr(getattr(driver, "driver", None), "is_initialized", False):
        return  # to ask for its devices would start it
    for gpu in getattr(devices, "gpus", ()):
        context = getattr(gpu, "primary_context", None)
        for owner in (getattr(context, "memory_manager", None), context):
            pending = getattr(owner, "deallocations", None)
            if pending is not None:
                with contextlib.suppress(Exception):  # numba's own: a kernel has faulted, and nothing can be freed
                    pending.clear()
