"""Recording a program: the device, the sources of events that it needs, and the trace file, in one context manager."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cudatool import _driver
from cudatool.collect import deferred_frees
from cudatool.collect.children import child_processes
from cudatool.collect.hand_overs import HandOvers
from cudatool.collect.levels import Level
from cudatool.collect.nvtx_ranges import RangeLog, nvtx_ranges
from cudatool.config import KERNEL_CHECKS
from cudatool.errors import OutputError, names_given
from cudatool.loading.after_import import AfterImport
from cudatool.memory.settings import conf_in_environment
from cudatool.recording import children as _children
from cudatool.recording.before import Before
from cudatool.recording.identity import job_facts
from cudatool.recording.on_oom import OomReport, explained_by
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Kind
from cudatool.trace.libraries import Library
from cudatool.trace.recorder import Recorder

if TYPE_CHECKING:
    from cudatool.sim.observe.tape import Tape
    from cudatool.trace.events import Event

__all__ = [
    "drain",
    "facts_at_the_end",
    "flush",
    "is_observing",
    "is_reporting",
    "libraries",
    "living",
    "narrow",
    "observing",
    "paused",
    "present_header",
    "record",
    "release_caches",
    "sources",
    "up_to_date",
]

_LIBRARIES = {  # by the module whose import shows that a program uses it
    "torch": Library.PYTORCH,
    "cupy": Library.CUPY,
    "jax": Library.JAX,
    "tensorflow": Library.TENSORFLOW,
    "numba.cuda": Library.NUMBA,
}
_ranges: RangeLog | None = None  # reads the ranges of NVTX, unless the collector of CUPTI does
_observing: dict[str, Any] | None = None  # what the open block's header says
_reports = 0  # open blocks that report when memory runs out


@contextmanager
def record(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    with_stacks: bool = True,
    measure_accesses: bool = False,
    checks: str | Sequence[str] = (),
    tape: Tape | None = None,
    level: Level | str = Level.KERNELS,
    force: bool = False,
    children: bool | None = None,
    children_forget: bool = False,
    on_oom: bool = False,
) -> Iterator[Recorder]:
    """Record everything that happens on the device inside the ``with`` block to the trace file `path`.

    A recording that begins in the middle of a program starts with what is live at that moment: what its caching
    allocator holds and, on the software device, all of the driver's memory. On a GPU, it starts with what PyTorch's
    caching allocator holds and with the memory that CuPy's arrays lie in; the header says what cannot be listed.

    Our runtime's events are recorded on any device. On the software device, also the driver calls of any cuda.core or
    cuda.bindings program, when its operations ran, and on request which bytes its kernels touched. On a GPU, what any
    library asks of the driver, the kernels that ran, and the blocks of PyTorch's allocator; with `measure_accesses`
    instead PyTorch's operators with the bytes that they touch, and of a program without PyTorch what its launches may
    touch.

    Parameters
    ----------
    path
        The ``.ctrace`` file to write.
    device
        ``"auto"``, ``"cuda"`` or ``"sim[:OPTIONS]"``; default: ``CUDATOOL_DEVICE``, else ``auto``. Like every choice of
        a device, it is made once per process.
    with_stacks
        Record the Python stack of each event.
    measure_accesses
        Measure which bytes each kernel reads and writes (kernels run slower). A GPU cannot: there it is inferred from
        PTX which arguments a kernel reads and writes, for kernels of :func:`cudatool.compile`.
    checks
        The checkers to run kernels under (software device only), in a list or a text: ``"memcheck"``, ``"initcheck"``,
        ``"racecheck"``, ``"synccheck"``.
    tape
        Filled with what a replay of the run needs (software device only); kernels then run on one host thread.
    level
        How much of a GPU's own work is recorded, see :class:`~cudatool.collect.levels.Level`; the software device
        records all. A recording that begins after the program started the driver records the launch of a graph node
        by node: as a whole is not safe for graphs that exist already.
    force
        Replace an existing file.
    children
        Also record the Python processes that are started inside of the block, and those that they start: each that uses
        a device gets a trace next to `path`, with its process id in the name.
    children_forget
        These drop the variables of their main modules before their recordings end, as Python does after that: what is
        left then has leaked.
    on_oom
        When memory runs out for the first time in a process, write a report next to its trace: ``NAME.oom.txt``.

    Raises
    ------
    OutputError
        The file exists and `force` is not set, or it cannot be written.
    ConfigError, DeviceUnavailableError
        See :mod:`cudatool._driver`.
    UsageError
        There is no such check or level.
    """

    with sources(
        device=device, with_stacks=with_stacks, measure_accesses=measure_accesses, checks=checks, tape=tape, level=level
    ) as header:
        run = {"run": os.urandom(8).hex()} if children else {}
        with paused():  # what other threads do now would be neither in what lives nor among the events
            before, facts = living()
            recorder = Recorder(path, header=header | facts | run | job_facts(), force=force)
            for event in before:
                recorder(event)
            hooks.subscribe(recorder)
        family = _children.ChildSettings(
            os.path.abspath(path),
            run.get("run", ""),
            with_stacks,
            measure_accesses,
            header["checks"],
            str(level),
            on_oom,
            children_forget,
        )
        beside = nullcontext() if children is None else _children.unrecorded()
        reporting = _reporting(recorder) if on_oom else nullcontext()
        with recorder, _naming(recorder), reporting, _children.recorded(family, recorder) if children else beside:
            try:
                yield recorder
            finally:
                release_caches()
                drain()
                if not recorder.is_closed:  # as it happens in a forked child
                    recorder.add_facts(facts_at_the_end())


@contextmanager
def _naming(recorder: Recorder) -> Iterator[None]:
    """Name libraries in a trace as soon as they are imported: of a program that is killed, its end writes nothing."""

    def note(_: ModuleType) -> None:
        with suppress(OutputError):  # the recorder says so itself
            recorder.add_facts({"libraries": libraries()})

    finder = AfterImport(dict.fromkeys(_LIBRARIES, note))
    try:
        finder.start()
        yield
    finally:
        finder.stop()


@contextmanager
def sources(
    *,
    device: str | None = None,
    with_stacks: bool = True,
    measure_accesses: bool = False,
    checks: str | Sequence[str] = (),
    tape: Tape | None = None,
    level: Level | str = Level.KERNELS,
) -> Iterator[dict[str, Any]]:
    """Let everything that happens on the device inside the ``with`` block reach the subscribers of the hooks.

    The parameters are those of :func:`record`; the value is what a trace's header says of the recording. A nested block
    changes nothing: the outermost one decides.
    """
    global _observing, _ranges
    level, checks = Level(level), names_given("check of kernels", checks, KERNEL_CHECKS)
    if _observing is not None:
        yield dict(_observing)
        return

    _driver.choose(device)
    choice = _driver.initialize()
    machine = choice.machine
    nvidia_runs = machine is None and _driver.nvidia_has_started()
    header = _header(choice, measure_accesses, checks) | {"stacks": with_stacks}
    if machine is not None and (count := _parts().in_flight(machine)):
        header["in_flight_before"] = count
    try:
        with ExitStack() as undo:
            undo.callback(stacks.enable, True)
            stacks.enable(with_stacks)
            hooks.wants_accesses = measure_accesses
            starts = child_processes()
            undo.callback(starts.remove)
            starts.install()
            if measure_accesses:
                hand_overs = HandOvers()
                undo.callback(hand_overs.remove)
                hand_overs.install()
            if machine is not None:
                undo.enter_context(_parts().driver(machine, measure_accesses, checks, tape, _held))
            else:
                header |= undo.enter_context(_parts().driver(measure_accesses, level))
            _ranges = _parts().range_log()
            header |= undo.enter_context(nvtx_ranges(_ranges, may_set=not nvidia_runs))
            watch = machine.scheduler.watch if machine is not None else None
            header["watches_host_reads"] = watch is not None and watch.sees_reads
            _observing = header
            yield header
    finally:
        _observing = _ranges = None
        hooks.wants_accesses = hooks.measures_accesses = hooks.reports_graphs = False


@contextmanager
def paused() -> Iterator[None]:
    """Let other threads wait that take memory, or give it back: of the caching allocator and of the software driver.

    Of a GPU's driver, and of PyTorch's allocator, what they do in it is passed on afterwards. What happened before is
    passed on at the beginning: who subscribes inside of the ``with`` block does not get it.
    """
    if _ranges is not None:
        _ranges.flush()
    allocator = _allocator()
    with ExitStack() as held:
        if allocator is not None:
            held.enter_context(allocator.paused())
        if _driver.chosen() is not None:  # last: a thread that holds the other may wait for it
            held.enter_context(_parts().paused())
        yield


def living() -> tuple[list[Event], dict[str, Any]]:
    """Return the events that would have reported what lives now, and what a trace's header says of them."""
    allocator = _allocator()
    held = _held()
    limits = [] if allocator is None else list(allocator.fractions())
    others = Before() if _driver.chosen() is None else _parts().living(held)
    held += others.blocks
    lived = others.allocations
    prior = Counter(event.device for event in held)
    facts: dict[str, Any] = {"prior_records": prior} if prior else {}
    facts |= {"prior_allocations": len(lived)} if lived else {}
    owned = sum(event.size for event in (*held, *lived) if event.kind in (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC))
    facts |= {"prior_bytes": owned} if owned else {}
    facts |= {"unknown_before": others.unknown} if others.unknown else {}
    return [*limits, *held, *lived, *others.notes], facts


def present_header() -> dict[str, Any]:
    """Return what a trace's header says of this process now, whether it is being recorded or not."""
    choice = _driver.chosen()
    if _observing is not None:
        return dict(_observing)
    return {"argv": sys.argv, "pid": os.getpid()} if choice is None else _header(choice, False, ())


def is_reporting() -> bool:
    """Return whether an open :func:`record` block reports that memory ran out."""
    return _reports > 0


def _header(choice: _driver.Choice, measure_accesses: bool, checks: Sequence[str]) -> dict[str, Any]:
    machine = choice.machine
    header: dict[str, Any] = {
        "device": choice.description,
        "device_kind": choice.kind,
        "argv": sys.argv,
        "pid": os.getpid(),
        "records_accesses": measure_accesses,
        "accesses": bool(measure_accesses and machine is not None),
        "watches_host_memory": bool(measure_accesses and machine is not None),
        "checks": list(checks) if machine is not None else [],
    }
    if conf := conf_in_environment():
        header["allocator_conf"] = conf[1]
    if machine is not None:  # querying a GPU would initialize its driver before the program does
        header["total_memory"] = [machine.options.memory] * machine.options.count
    return header


def facts_at_the_end() -> dict[str, Any]:
    """Return what a trace's header says that only the end of a recording shows."""
    facts: dict[str, Any] = _parts().facts_at_the_end()
    return facts | {"libraries": libraries()}


def libraries() -> list[str]:
    """Return the imported libraries whose own work on a GPU may go unrecorded."""
    return [name for module, name in _LIBRARIES.items() if module in sys.modules]


def _parts() -> ModuleType:
    """Return what records on the device that was chosen. The parts for the other are not imported."""
    choice = _driver.chosen()
    if choice is not None and choice.machine is None:
        from cudatool.recording import gpu  # only a GPU needs it

        return gpu
    from cudatool.recording import software  # a GPU needs none of it

    return software


def _allocator() -> ModuleType | None:
    """Return the module of the caching allocator, if the program uses it: importing it would start the runtime."""
    return sys.modules.get("cudatool.runtime.allocator")


def _held() -> list[Event]:
    """Return what the caching allocator already holds; nothing at the start of a program."""
    allocator = _allocator()
    return [] if allocator is None else list(allocator.living())


def observing() -> dict[str, Any]:
    """Return what a trace's header says of the open :func:`record` or :func:`sources` block."""
    return dict(_observing or {})


def is_observing() -> bool:
    """Return whether a :func:`record` or :func:`sources` block is open."""
    return _observing is not None


def narrow(checks: Iterable[str]) -> None:
    """Run kernels only under these of the checks that :func:`sources` turned on, until the next call.

    Pending work runs first, under the earlier checks. Once on, initcheck stays on.
    """
    choice = _driver.chosen()
    if choice is not None and choice.machine is not None and choice.machine.checkers is not None:
        drain()
        choice.machine.checkers.narrow(checks)


def release_caches() -> None:
    """Release the memory that libraries cache on purpose and that would look like a leak.

    This is cuBLAS's workspaces, and what the program has released but numba has not freed yet.
    """

    workspaces = sys.modules.get("cudatool.blas._workspace")  # the program does not use it
    if workspaces is not None:
        workspaces.clear_workspaces()
    deferred_frees.carry_out()


@contextmanager
def _reporting(recorder: Recorder) -> Iterator[None]:
    """Write a report when memory runs out inside of the ``with`` block."""
    global _reports
    _reports += 1
    try:
        with explained_by(OomReport(lambda: up_to_date(lambda: recorder))):
            yield
    finally:
        _reports -= 1


def up_to_date(recorder_of: Callable[[], Recorder | None]) -> str | None:
    """Return the file of a recorder, with all that can be known now without running pending work.

    The recorder is asked for when what was logged has been passed on, which may make it; without one there is no file.
    """
    flush()
    recorder = recorder_of()
    if recorder is None or recorder.is_closed:
        return None
    recorder.add_facts({"libraries": libraries()})  # whose the memory is
    return recorder.place


def flush() -> None:
    """Pass on what was logged and not yet reported: NVTX's ranges and, on a GPU, PyTorch's and the driver's part."""
    if _observing is not None:
        _parts().flush()
    if _ranges is not None:
        _ranges.flush()


def drain() -> None:
    """Pass everything that happened so far to the subscribers.

    Pending work of the software device is run; PyTorch's log is read.
    """
    flush()
    if _driver.chosen() is not None:
        _parts().drain()
