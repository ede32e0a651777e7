"""Events, hooks, and the trace file. Knows nothing of CUDA.

``subscribe`` sees events as they happen; a ``Recorder`` writes them to a file, and ``read`` gives them back.
"""

from __future__ import annotations

from cudatool.trace.events import Event, Kind
from cudatool.trace.hooks import subscribe, unsubscribe
from cudatool.trace.model import Frame, Trace
from cudatool.trace.reader import is_trace, newest_trace, read
from cudatool.trace.recorder import Recorder

__all__ = [
    "Event",
    "Frame",
    "Kind",
    "Recorder",
    "Trace",
    "is_trace",
    "newest_trace",
    "read",
    "subscribe",
    "unsubscribe",
]
