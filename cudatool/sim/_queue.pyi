"""What _queue.c offers to queue.py: the part of the scheduler that every operation passes through."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, type_check_only

from cudatool.sim.jit.kernel import JitKernel
from cudatool.sim.jit.team import Team, TeamPlan
from cudatool.sim.kernels import Function
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
    footprint: Sequence[tuple[int, int, int]]
    findings: Sequence[CheckFinding]
    programmatic: tuple[bool, bool, bool, bool]
    host_source: tuple[int, int]
    host_target: Sequence[tuple[int, int]]
    host_memory: Sequence[tuple[int, int]]
    launch: _Operation | None
    node: int

    def __init__(self, stream: StreamState, kind: str, name: str, correlation: int) -> None: ...
    @property
    def predecessors(self) -> Sequence[_Operation]: ...
    @property
    def dependents(self) -> Sequence[_Operation]: ...

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

@type_check_only
class _OfShape:
    """What a shape says of its launches, and they say by it."""

    @property
    def function(self) -> Function: ...
    @property
    def kernel(self) -> JitKernel: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def block(self) -> tuple[int, int, int]: ...
    @property
    def shared(self) -> int: ...
    @property
    def cost(self) -> int: ...
    @property
    def threads(self) -> int: ...

class Shape(_OfShape):
    """What launches of a kernel on one device have in common that differ in their arguments only.

    Attributes
    ----------
    shared
        Bytes of dynamic shared memory.
    cost
        Virtual ns that one takes.
    threads
        Of all blocks.
    plan
        What the native code needs, once one has run where nothing was checked, in a context with no heap and the limits
        that it began with, and in code that counts no rounds of loops; None before.
    """

    plan: TeamPlan | None

    def __init__(
        self,
        function: Function,
        kernel: JitKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        cost: int,
        threads: int,
    ) -> None: ...

class Launch(_OfShape):
    """See :class:`cudatool.sim.launches.Launch`.

    `arguments` are those as they are declared, or the address of pointers to each of them: ValueError if one is NULL.
    """

    def __new__(cls, shape: Shape, arguments: int | bytes, cooperative: bool = False, /) -> Self: ...
    def __call__(self, operation: _Operation, /) -> None: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def cooperative(self) -> bool: ...
    @property
    def address(self) -> int: ...
    @property
    def arguments(self) -> bytes: ...

teams: list[Team]
"""Idle teams, the one that was used last at the end."""

def shape_key(
    context: int, instrument: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, /
) -> bytes:
    """Return the key of a shape among those of its kernel (``Function.fitting``)."""

def again(
    f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, pointers: int, /
) -> bool:
    """Make a launch like one before, with the arguments of cuLaunchKernel; return False if there was none."""

def again_as(config: int, f: int, pointers: int, /) -> bool:
    """Do as :func:`again` with the arguments of cuLaunchKernelEx."""

def take_team(plan: TeamPlan, /) -> Team | None:
    """Return an idle team that is ready for `plan`, which is no longer idle; None if there is none."""

def run_team(team: Team, arguments: int, first: int, /) -> bool:
    """Let a team run a launch with the arguments at this address, from a block on; return whether it ended early."""

def install_launches(
    *,
    names: dict[str, Any],
    stream_of: Callable[[int], StreamState],
    instrument: Callable[[], int],
    function: type[Function],
    launch: type[Launch],
    operation: type[_Operation],
    call: Any,
) -> None:
    """Give what is needed of machine.py (its namespace, with `machine`, and a function) and of other modules."""

def set_native(calls: int, hold: int, release: int, interrupts: Callable[[], bool], /) -> None:
    """Give the addresses of three functions of _libcuda.c and _workers.c, and one of signals.py."""
