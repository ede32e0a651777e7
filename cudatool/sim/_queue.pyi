"""What _queue.c offers to queue.py: the part of the scheduler that every operation passes through."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from cudatool.sim.observe.checkers import CheckFinding
from cudatool.sim.observe.host_watch import HostWatch
from cudatool.sim.queue import Operation as _Operation
from cudatool.sim.queue import StreamState

class Operation:
    """See :class:`cudatool.sim.queue.Operation`."""

    stream: StreamState
    kind: str
    name: str
    correlation: int
    done: bool
    missing: int
    sequence: int
    start: int
    end: int
    run: Callable[[_Operation], None] | None
    until: Callable[[], bool] | None
    value: tuple[int, int, int, int]
    footprint: list[tuple[int, int, int]]
    findings: list[CheckFinding]
    programmatic: tuple[bool, bool, bool, bool]
    host_source: tuple[int, int]
    host_target: list[tuple[int, int]]
    host_memory: list[tuple[int, int]]
    launch: _Operation | None
    node: int

    def __init__(self, stream: StreamState, kind: str, name: str, correlation: int) -> None: ...
    @property
    def predecessors(self) -> list[_Operation]: ...
    @property
    def dependents(self) -> list[_Operation]: ...

class Queue:
    """Everything that is pending.

    Attributes
    ----------
    host_time
        Virtual ns on the host's clock: advances with driver calls and jumps forward when the host waits.
    watch
        Notices what the host writes to memory that operations use.
    turn
        What an operation runs in. Several host threads may run operations at the same time, unless this forbids.
    """

    host_time: int
    watch: HostWatch | None
    turn: Callable[[_Operation], AbstractContextManager[object]] | None
    _in_order: bool
    """Whether operations run in the order of enqueuing."""
    _is_shared: bool
    """Whether other processes see memory of this one."""

    @property
    def _pending(self) -> dict[int, _Operation]:
        """By sequence number, so ordered by enqueuing."""

    @property
    def _ready(self) -> dict[int, _Operation]:
        """Those of them that wait for nothing else and do not run yet."""

    @property
    def _until(self) -> dict[int, _Operation]:
        """Those of them that wait for a value in memory."""

    @property
    def _running(self) -> int:
        """How many run."""

    def enqueue(self, operation: _Operation, *, cost: int, engine: str = "", after: Iterable[_Operation] = ()) -> None:
        """Put `operation` at the end of its stream, `cost` ns long, after the operations in `after` too.

        Operations that name the same `engine` of a device do not overlap in virtual time. Work in the legacy default
        stream waits for all blocking streams of the context, and they wait for it (CUDA driver API, "Stream
        synchronization behavior").
        """

    def add(
        self, operation: _Operation, *, cost: int, engine: str = "", after: Iterable[_Operation | None] = ()
    ) -> None:
        """Make `operation` pending, ordered after those in `after` and nothing else: it takes no place in its stream.

        This is how the nodes of a graph are ordered by the graph's edges alone.
        """

    def order(self, operation: _Operation, after: Iterable[_Operation], /) -> None:
        """Let a pending `operation`, which does not run yet, wait for those in `after` too."""

    def _run(self, operation: _Operation, /) -> None:
        """Execute an operation that is ready, without the driver's lock, and let those that wait for it be ready."""

    def _run_in_order(self, target: _Operation, /) -> bool:
        """Execute until `target` is done if that can be done in the order of enqueuing; return whether it is done."""

def install(
    names: dict[str, Any],
    lock: Any,
    acquire: Callable[[], object],
    release: Callable[[], object],
    interruption: Any,
    /,
) -> None:
    """Give what is needed of abi.py (its namespace, with `subscribers`, and its lock) and of signals.py."""
