"""Which id streams and CUDA events have in a trace: the driver reuses handles, ids are unique."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from cudatool.trace.events import Api, Kind, StreamFlag
from cudatool.trace.threads import thread_id

__all__ = [
    "announce",
    "close_event",
    "close_stream",
    "device_of_stream",
    "event_id",
    "event_ids",
    "forget_destroyed",
    "known_streams",
    "reset",
    "stream_id",
    "stream_ids",
]

announce: Callable[..., None] | None = None
"""What emits an event, while there is a subscriber."""

_stream_ids: dict[tuple[int, int, int], int] = {}
_streams: dict[int, dict[str, Any]] = {}  # what STREAM_CREATE says of each id
_devices: dict[int, int] = {}  # by handle, of the stream that had it last; not of default streams
_event_ids: dict[int, int] = {}
_stream_counter = itertools.count(1)
_event_counter = itertools.count(1)
_LEGACY, _PER_THREAD = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
_BLOCKING = StreamFlag(0)


def stream_id(
    device: int,
    handle: int,
    *,
    flags: StreamFlag = _BLOCKING,
    priority: int = 0,
    api: Callable[[], Api] = lambda: Api.CUDATOOL,
    thread: int = 0,
    context: int = 0,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Return the id of the stream with this driver handle, emitting ``STREAM_CREATE`` when it is first seen.

    A source that reports the past passes the `thread` that it was on, and as `report` what sends that event with the
    time and the stack of then.

    Handle 0 is taken for the legacy default stream (as the driver does unless compiled otherwise), 1 is
    ``CU_STREAM_LEGACY``, 2 ``CU_STREAM_PER_THREAD`` (one stream for each host thread). Each `context` has its own; 0 is
    the device's primary one, or one that the source does not know. `api` is asked then through which library that was.
    """
    handle = handle or _LEGACY
    own = context << 32 if handle <= _PER_THREAD else 0  # other handles are of one context
    key = (device, handle, own | (thread or thread_id()) if handle == _PER_THREAD else own)
    found = _stream_ids.get(key)
    if found is not None:
        return found
    # No lock, here and in event_id: a finalizer may come here in the middle of it, on the same thread.
    new = next(_stream_counter)
    found = _stream_ids.setdefault(key, new)
    if found != new:
        return found
    if handle > _PER_THREAD:
        _devices[handle] = device
    if handle == _LEGACY:
        flags |= StreamFlag.LEGACY_DEFAULT
    elif handle == _PER_THREAD:
        flags |= StreamFlag.PER_THREAD_DEFAULT
    aux0, aux1 = priority & 0xFFFFFFFFFFFFFFFF, api()
    facts = {"device": device, "stream": new, "address": handle, "flags": flags, "aux0": aux0, "aux1": aux1}
    _streams[new] = facts | {"size": context}
    if report is not None:
        report(_streams[new])
    elif announce is not None:
        announce(Kind.STREAM_CREATE, **_streams[new])
    return new


def device_of_stream(handle: int, current: int) -> int:
    """Return the device of a stream, given the one that is current: calls take streams of other devices, too."""
    return _devices.get(handle, current)


def close_stream(device: int, handle: int) -> int:
    """Forget a destroyed stream's handle and return the id it had (0 if never seen)."""
    stream = _stream_ids.pop((device, handle, 0), 0)
    _streams.pop(stream, None)
    _devices.pop(handle, None)
    return stream


def event_id(handle: int) -> int:
    """Return the id of the CUDA event with this driver handle."""
    found = _event_ids.get(handle)
    return _event_ids.setdefault(handle, next(_event_counter)) if found is None else found


def stream_ids() -> dict[tuple[int, int, int], int]:
    """Return the ids of streams by device, handle and 0. Only to be read.

    In place of 0, default streams have ``context << 32``, per-thread ones with the thread added.
    """
    return _stream_ids


def event_ids() -> dict[int, int]:
    """Return the ids of events by their handles: the table itself, only to be read."""
    return _event_ids


def close_event(handle: int) -> int:
    """Forget a destroyed event's handle and return the id it had (0 if never seen)."""
    return _event_ids.pop(handle, 0)


def known_streams() -> Iterable[dict[str, Any]]:
    """Return what ``STREAM_CREATE`` says of each stream that is known."""
    return list(_streams.values())


def forget_destroyed(is_alive: Callable[[int], bool]) -> None:
    """Forget the streams and events that were destroyed unseen, by what tells whether a handle is still one.

    Default streams stay, and so do events without a handle of the driver's.
    """
    for device, handle, context in list(_stream_ids):
        if handle > _PER_THREAD and not is_alive(handle):
            _streams.pop(_stream_ids.pop((device, handle, context)), None)
            _devices.pop(handle, None)
    for handle in list(_event_ids):
        if handle > 0 and not is_alive(handle):
            del _event_ids[handle]


def reset() -> None:
    """Forget every id (tests)."""
    global _stream_counter, _event_counter
    _stream_ids.clear()
    _streams.clear()
    _devices.clear()
    _event_ids.clear()
    _stream_counter, _event_counter = itertools.count(1), itertools.count(1)
