"""How events name contexts and streams of the software device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cudatool.collect.callers import calling_api
from cudatool.trace import hooks
from cudatool.trace.events import StreamFlag

if TYPE_CHECKING:
    from cudatool.sim.queue import StreamState

__all__ = ["context_number", "id_of_stream"]

_ids: Final = hooks.stream_ids()


def context_number(context: Any) -> int:
    """Return how events name a context of the software device: 0 for a device's primary one and its green ones."""
    context = context.primary
    return 0 if context is context.device.primary else int(context.serial)


def id_of_stream(stream: StreamState) -> int:
    """Return the id of a stream in events; it may be one that was made before the recording, and is first seen here."""
    context = stream.context
    device = context.device
    known = _ids.get((device.ordinal, stream.handle, 0)) if context is device.primary else None
    if known is not None:  # all but once; to ask with what the stream is takes longer
        return known
    return hooks.stream_id(
        device.ordinal,
        stream.handle,
        flags=StreamFlag.NON_BLOCKING if stream.flags & 1 else StreamFlag(0),
        priority=stream.priority,
        context=context_number(context),
        api=calling_api,
    )
