"""Collective operations on the software device: NumPy, run when the ranks' streams get there.

Ranks in one process meet by events: every stream waits until all have come to the operation, and the first one does it
for all. Ranks that are processes send each other what they have when their streams get there, and wait.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import numpy as np

from cudatool.errors import CudaError, CudatoolError, UsageError
from cudatool.nccl._calls import PAIRED, Name, RankPart
from cudatool.nccl._numerics import check, perform
from cudatool.nccl._peers import Message, Peers
from cudatool.runtime import host_function
from cudatool.runtime.allocator import Layout
from cudatool.runtime.calls import operation
from cudatool.runtime.device import device as on_device
from cudatool.runtime.event import Event

__all__ = ["library"]

_VERSION: Final = (2, 28, 0)  # of the interface


# Ranks in one process.


@dataclass(slots=True, eq=False)
class _Waiting:
    call: RankPart
    correlation: int | None = None  # when it is enqueued


class _Clique:
    """The ranks of a communicator, all in this process.

    Parameters
    ----------
    size
        How many.
    one_caller
        Whether a group has the calls of all of them; otherwise they are threads, which wait for each other.
    """

    def __init__(self, size: int, one_caller: bool) -> None:
        self._one_caller = one_caller
        self._ranks: list[deque[_Waiting]] = [deque() for _ in range(size)]
        self._pairs: dict[tuple[int, int], tuple[deque[_Waiting], deque[_Waiting]]] = {}
        self._news = threading.Condition()
        self._failed = ""

    def enqueue(self, calls: Sequence[RankPart]) -> list[int]:
        """Enqueue what is complete with these calls; return when they all are."""
        own = [_Waiting(call) for call in calls]
        with self._news:
            try:
                for waiting in own:
                    self._add(waiting)
            except UsageError as error:
                self._forget(str(error))
                raise
            self._news.notify_all()
            while missing := [waiting.call for waiting in own if waiting.correlation is None]:
                if self._failed:
                    raise UsageError(self._failed)
                if self._one_caller:
                    self._forget()
                    raise UsageError(
                        f"rank {missing[0].rank} calls {missing[0].name}, which needs calls of other ranks; put those "
                        "of all ranks in one cudatool.nccl.group()"
                    )
                self._news.wait()
        return [waiting.correlation or 0 for waiting in own]

    def close(self) -> None:
        """Do nothing: what was enqueued needs no connection."""

    def _forget(self, reason: str = "") -> None:
        for queue in self._ranks:
            queue.clear()
        self._pairs.clear()
        if not self._one_caller:  # other threads wait
            self._failed = reason
            self._news.notify_all()

    def _add(self, waiting: _Waiting) -> None:
        call = waiting.call
        if call.name in PAIRED:
            key = (call.rank, call.peer) if call.name == Name.SEND else (call.peer, call.rank)
            pair = self._pairs.setdefault(key, (deque(), deque()))
            pair[call.name == Name.RECV].append(waiting)
            queues: Sequence[deque[_Waiting]] = pair
        else:
            self._ranks[call.rank].append(waiting)
            queues = self._ranks
        if all(queues):
            _enqueue_together([queue.popleft() for queue in queues])


class _Meeting:
    """One operation. The first rank whose stream comes to it computes it for all; their streams are all there by then.

    Each rank gets its result when its own stream comes: a stream that waited for another rank's does not see it.
    """

    def __init__(self, calls: Sequence[RankPart]) -> None:
        first = calls[0]
        if first.name in PAIRED:
            sender, receiver = calls
            sent, received = [sender.sent], [receiver.received]
        else:
            asked = sorted({f"{call.name}(op={call.op}, root={call.peer})" for call in calls})
            if len(asked) > 1:
                raise UsageError(f"the ranks call different operations: {' and '.join(asked)}")
            sent, received = [call.sent for call in calls], [call.received for call in calls]
        check(first.name, sent, received)
        self._name, self._op = first.name, first.op
        self._sent, received = list(map(_bare, sent)), list(map(_bare, received))
        self._results = [None if target is None else np.empty_like(target) for target in received]
        stores = list(zip(received, self._results, strict=True))
        self._stores = [(None, None), *stores] if first.name in PAIRED else stores  # by caller
        self._came = 0
        self._lock = threading.Lock()

    def come(self, caller: int) -> None:
        """The stream of one of the ranks, by its place in the calls, is there."""
        with self._lock:
            if self._came % len(self._stores) == 0:  # a graph that is launched again meets again
                perform(self._name, self._op, self._sent, self._results)
            self._came += 1
            target, result = self._stores[caller]
            if target is not None:
                target[...] = result


def _bare(layout: Layout | None) -> Layout | None:
    return None if layout is None else host_function.unowned(layout)


def _enqueue_together(ranks: Sequence[_Waiting]) -> None:
    """Enqueue one operation on the streams of all its ranks."""
    meeting = _Meeting([waiting.call for waiting in ranks])
    streams = [waiting.call.stream for waiting in ranks]
    marks = [stream.record_event() for stream in streams]
    for caller, (waiting, stream) in enumerate(zip(ranks, streams, strict=True)):
        for mark in marks:
            stream.wait_event(mark)
        with on_device(stream.device_index), operation() as waiting.correlation:
            come = functools.partial(meeting.come, caller)
            host_function.enqueue(come, stream, waiting.call.accesses)


# Ranks that are processes.


class _Process:
    """The end of one rank, where each is a process."""

    def __init__(self, peers: Peers, rank: int, size: int) -> None:
        self._peers = peers
        self._rank = rank
        self._size = size
        self._last: Event | None = None  # after the latest operation: they take place in the order of their calls
        self._error: CudatoolError | None = None

    def enqueue(self, calls: Sequence[RankPart]) -> list[int]:
        """Enqueue calls: what is sent first, so that ranks which send to each other do not wait for each other."""
        if self._error is not None:
            raise CudaError(f"an operation of this communicator failed: {self._error}")
        found: dict[RankPart, int] = {}
        for call in sorted(calls, key=lambda call: call.name != Name.SEND):
            stream = call.stream
            part = functools.partial(self._take_part, call, _bare(call.sent), _bare(call.received))
            if self._last is not None:
                stream.wait_event(self._last)
            with on_device(stream.device_index), operation() as found[call]:
                host_function.enqueue(part, stream, call.accesses)
            self._last = stream.record_event()
        return [found[call] for call in calls]

    def close(self) -> None:
        """Wait for what was enqueued, and leave."""
        if self._last is not None:
            self._last.synchronize()
        self._peers.close()

    def _take_part(self, call: RankPart, sent: Layout | None, received: Layout | None) -> None:
        try:
            self._exchange(call, sent, received)
        except CudatoolError as error:
            self._error = error
            raise

    def _exchange(self, call: RankPart, sent: Layout | None, received: Layout | None) -> None:
        """Send what others need, and wait for what this rank needs."""
        everyone = list(range(self._size))
        if call.name in PAIRED:
            sources, targets = [call.peer], [call.peer]
        else:
            sources = [call.peer] if call.name == Name.BROADCAST else everyone
            targets = [call.peer] if call.name == Name.REDUCE else everyone
        if sent is not None:
            message = Message(call.name, call.op, sent)
            self._peers.send([rank for rank in targets if rank != self._rank], message)
        if received is None:
            return
        values = [sent if rank == self._rank else self._taken(call, rank) for rank in sources]
        if call.name in PAIRED:
            into: list[Layout | None] = [received]
        else:
            into = [received if rank == self._rank else None for rank in everyone]
        check(call.name, values, into)
        perform(call.name, call.op, values, into)

    def _taken(self, call: RankPart, rank: int) -> Layout:
        paired = call.name in PAIRED
        message = self._peers.take(rank, paired=paired)
        if not paired and (message.name, message.op) != (call.name, call.op):
            raise UsageError(
                f"the ranks call different operations: {call.name}(op={call.op}), and rank {rank} "
                f"{message.name}(op={message.op})"
            )
        return message.values


_threads: WeakValueDictionary[bytes, _Clique] = WeakValueDictionary()  # by unique id, while a rank is open
_lock = threading.Lock()


class _Host:
    """:class:`cudatool.nccl._communicator.Library`; a handle is a :class:`_Clique` or a :class:`_Process`."""

    def version(self) -> tuple[int, ...]:
        """Return the version of NCCL whose interface this is."""
        return _VERSION

    def unique_id(self) -> bytes:
        """Return a new key."""
        return secrets.token_hex(20).encode().ljust(128, b"\0")

    def init_rank(self, ranks: int, uid: bytes, rank: int, device: int) -> _Clique | _Process:
        """Return the handle of one rank."""
        peers = Peers(ranks, uid, rank)
        processes = len(set(peers.processes))
        if processes == ranks > 1:
            return _Process(peers, rank, ranks)
        peers.close()
        if processes > 1:
            raise UsageError("on the software device the ranks are all in one process, or each in its own")
        with _lock:
            return _threads.setdefault(uid, _Clique(ranks, one_caller=False))

    def init_all(self, devices: Sequence[int]) -> list[_Clique]:
        """Return the handles of all ranks, which are the same."""
        return [_Clique(len(devices), one_caller=True)] * len(devices)

    def enqueue(self, calls: Sequence[tuple[_Clique | _Process, RankPart]]) -> list[int]:
        """Enqueue a group of calls."""
        by_handle: dict[_Clique | _Process, list[RankPart]] = {}
        for handle, call in calls:
            by_handle.setdefault(handle, []).append(call)
        found: dict[RankPart, int] = {}
        for handle, own in by_handle.items():
            found.update(zip(own, handle.enqueue(own), strict=True))
        return [found[call] for _, call in calls]

    def destroy(self, handle: _Clique | _Process) -> None:
        """Let a rank leave."""
        handle.close()


library: Final = _Host()
