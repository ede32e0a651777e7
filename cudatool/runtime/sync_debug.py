"""Hidden synchronizations: places where the program waits for the device without having said so.

They are copies to the host that block, copies to the device that block, and copies to pageable host memory, for which
the driver always waits; with everything that ends in one of these. ``synchronize`` of a device, a stream or an event
says what it does and is not hidden.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Final

from cudatool.errors import SynchronizationError, UsageError

__all__ = ["get_sync_debug_mode", "hidden_synchronization", "set_sync_debug_mode"]

_MODES: Final = {"default": 0, "warn": 1, "error": 2}
_OURS: Final = os.path.dirname(__file__) + os.sep

_mode = 0  # one for the process, as torch has it


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Choose what a hidden synchronization does besides.

    Parameters
    ----------
    debug_mode
        0 or ``"default"``: nothing; 1 or ``"warn"``: it warns; 2 or ``"error"``: it raises
        :class:`~cudatool.errors.SynchronizationError` instead.

    Raises
    ------
    UsageError
        It is no mode.
    """
    global _mode
    mode = _MODES.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if mode not in _MODES.values():
        raise UsageError(f"{debug_mode!r} is not a mode; choose 0 or 'default', 1 or 'warn', 2 or 'error'")
    _mode = mode


def get_sync_debug_mode() -> int:
    """Return what a hidden synchronization does: 0 nothing, 1 warn, 2 raise an error."""
    return _mode


def hidden_synchronization(what: str) -> None:
    """Say that the program is about to wait for the device; `what` it does and what would not wait.

    Raises
    ------
    SynchronizationError
        The mode is ``"error"``.
    """
    if not _mode:
        return
    text = f"called a synchronizing CUDA operation: {what}"
    if _mode == _MODES["error"]:
        raise SynchronizationError(text)
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, stacklevel=depth)
