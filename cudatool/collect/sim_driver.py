"""Turns the software driver's calls into events: what any cuda.core or cuda.bindings program does.

Calls that our runtime makes are left out (it emits its own events); what the device reports about them, execution times
and accesses, is tied to the runtime's operation. CUPTI on a GPU is the same shape and fits beside this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from cudatool.collect import sim_graph_calls, sim_memory, sim_streams, sim_work
from cudatool.collect.byte_sets import compress
from cudatool.collect.sim_blocks import BlockWatcher
from cudatool.collect.sim_calls import CallsInProgress, DriverCall, EmitCall, not_recorded
from cudatool.collect.sim_ids import id_of_stream
from cudatool.ptx.kernel_names import kernel_name
from cudatool.trace import hooks
from cudatool.trace.events import Kind, WarningCode, WarningFlag

if TYPE_CHECKING:
    from cudatool.sim import EntryPoint, Machine, Operation, Result
    from cudatool.sim.abi import GivenBack
    from cudatool.sim.machine import Context
    from cudatool.sim.observe.checkers import CheckFinding

__all__ = ["SimDriverCollector"]

_WORK = frozenset(["kernel", "memcpy", "memset", "host"])
_TOUCHES_MEMORY = _WORK - {"host"}
# Programs use these as queries: a failure is an answer and needs no warning.
_QUESTIONS = ("cuPointerGet", "cuDeviceGet", "cuGetError", "cuCtxGet")

_SYNCHRONIZE = frozenset(["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuCtxSynchronize_v2"])

_ENQUEUES_WORK = ("cuLaunch", "cuMemcpy", "cuMemset", "cuGraphLaunch")

# Results of cuStreamEndCapture that end the capture too, without a graph.
_ENDED = ("STREAM_CAPTURE_INVALIDATED", "STREAM_CAPTURE_UNJOINED")

# Calls that are recorded although they did not succeed: their error is a finding, or the answer to a query.
_REPORTED_FAILURES = (
    ("cuStreamWaitEvent", "CAPTURED_EVENT"),
    ("cuStreamQuery", "NOT_READY"),
    ("cuEventQuery", "NOT_READY"),
)

_GAPS = {  # of what a checker did not look at, by CheckFinding.kind
    "unchecked": (WarningFlag.RACES, WarningCode.RACECHECK_PARTIAL),
    "in-step": (WarningFlag.IN_STEP, WarningCode.WARP_IN_STEP),
    "unmeasured": (WarningFlag.UNSEEN, WarningCode.ACCESSES_NOT_KNOWN),
}
_ACCESS, _EXECUTION = Kind.ACCESS, Kind.EXECUTION  # to look them up takes longer (Python 3.11)


class SimDriverCollector:
    """Turns driver calls into events. Pass it to :func:`cudatool.sim.subscribe` while hooks have subscribers.

    Parameters
    ----------
    machine
        The software device.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.blocks = BlockWatcher(machine.checkers) if machine.checkers is not None else None
        self._calls = CallsInProgress(machine)
        self._thread = self._calls.thread
        self._owners: dict[int, tuple[int, int]] = {}  # operation -> correlation, stream id
        self._failed: set[int] = set()  # contexts
        for _, heap in machine.heaps:
            heap.begin()
        # Operations whose call is yet to be reported; and those of them that another thread has executed meanwhile.
        self._unreported: set[int] = set()
        self._handed_over: dict[int, Operation] = {}
        self._launches: dict[int, int] = {}  # first operation of a graph launch -> correlation of all of them

    # ---- what the driver calls (cudatool.sim.Subscriber) ----

    def enter(self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int) -> None:
        """Begin to note what the call does; and what it is about to destroy, while it still exists."""
        call, name = self._thread.call, entry.name
        if call.is_open:
            call = self._begin_beside(call)
        call.is_open, call.is_ours = True, hooks.current_operation() != 0
        call.operation, call.is_reported = None, False
        call.owners.clear()
        if name in _SYNCHRONIZE:
            call.began = monotonic_ns()
        if name in _REPORT_OFTEN:
            return
        call.memory, call.copies, call.values = (), (), ()
        if name == "cuStreamDestroy" and arguments[0] in self._machine.objects:
            call.device = self._calls.stream(arguments[0])[0]

    def _begin_beside(self, other: DriverCall) -> DriverCall:
        """Return what notes a call that begins while `other` has not ended: a finalizer's, or the one after Ctrl-C."""
        if self._machine.is_inner_call:
            self._thread.call = DriverCall(other)
            return self._thread.call
        self._unreported.difference_update(other.owners)
        return other

    def gives_back(
        self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int, what: tuple[GivenBack, Any]
    ) -> None:
        """Report what the call frees before another thread can get the same addresses, and report that."""
        call = self._thread.call
        if call.is_ours or not call.is_open:
            return
        call.is_reported = True
        self._report_executed(call)
        sim_memory.given_back(self._calls, dict(zip(entry.parameters, arguments, strict=True)), entry.name, *what)

    def enqueued(self, operation: Operation) -> None:
        """Tie the operation to the call that enqueued it."""
        call, stream, sequence, launch, kind = (
            self._thread.call,
            operation.stream,
            operation.sequence,
            operation.launch,
            operation.kind,
        )
        stream_id = id_of_stream(stream)
        correlation = self._launches.get(launch.sequence) if launch is not None else None
        if correlation is None:
            correlation = hooks.current_operation() or hooks.new_correlation()
            if launch is operation:
                self._launches[sequence] = correlation
        self._owners[sequence] = call.owners[sequence] = correlation, stream_id
        if not call.is_ours:
            self._unreported.add(sequence)
        if self._machine.tape is not None:
            self._machine.tape.owners[sequence] = correlation
        call.operation = operation
        if kind == "kernel":
            call.shape = getattr(operation.run, "shape", None)  # of a launch; when it has run, `run` is gone
        elif kind in ("alloc", "free"):
            call.memory += (operation,)
        elif kind in ("memcpy", "memset"):
            call.copies += (operation,)
        elif kind in ("write_value", "wait_value"):
            call.values += (operation,)
        elif kind == "host" and operation.run is not None:
            operation.run = _as_host_function(operation.run, correlation)
        if self.blocks is not None:
            self.blocks.enqueued(operation, stream_id, correlation)

    def executed(self, operation: Operation) -> None:
        """Note that the operation ran, to report it without the lock: after the call in progress, if there is one."""
        if self.blocks is not None:
            correlation, stream = self._owners.get(operation.sequence, (0, 0))
            self.blocks.executed(operation, stream, correlation)
        self._thread.call.later.append(operation)

    def unlocked(self) -> None:
        """Report what this thread has executed outside of any call."""
        self._report_executed(self._thread.call)

    def leave(self, entry: EntryPoint, arguments: tuple[Any, ...], correlation: int, result: Result) -> None:
        """Emit the event that the call stands for."""
        call, name = self._thread.call, entry.name
        try:
            checkers = self._machine.checkers
            found = None
            if checkers is not None and result.name == "INVALID_VALUE":
                found = checkers.explain_call(name, arguments[0])
                if found is not None:
                    self._finding(found, device=self._calls.device)
            if result == 0 and self._machine.captures:
                self._calls.graphs.captured(correlation)
            if call.is_ours:
                self._report_executed(call)
                return
            if name == "cuStreamEndCapture" and (result == 0 or result.name in _ENDED):
                sim_graph_calls.capture_end(self._calls, arguments)
            if result == 0 and (often := _REPORT_OFTEN.get(name)) is not None:
                often(self._calls, call, arguments)
            elif result == 0 or (name, result.name) in _REPORTED_FAILURES:
                call.is_ready = result == 0
                if not call.is_reported:
                    _report_of(name)(self._calls, dict(zip(entry.parameters, arguments, strict=True)), name)
            elif not name.startswith(_QUESTIONS) and result.name != "NOT_READY":
                self._failure(entry, arguments, result, is_found=found is not None)
            self._unreported.difference_update(call.owners)
            if self._handed_over:
                self._report_late(call)
            if call.later:
                self._report_executed(call)
        finally:
            call.is_open = False
            if call.outer is not None:
                self._thread.call = call.outer

    def _report_executed(self, call: DriverCall) -> None:
        executed, call.later = call.later, []
        for operation in executed:
            self._execution(operation)

    def _report_late(self, call: DriverCall) -> None:
        """Report what other threads have executed of the call's work before the call was reported."""
        for sequence in list(call.owners):
            operation = self._handed_over.pop(sequence, None)
            if operation is not None:
                self._execution(operation)

    def _hand_over(self, operation: Operation) -> bool:
        """Leave an operation that this thread has executed to the thread that is about to report its call.

        Return whether that thread will report it: exactly one of the two takes it out of the table.
        """
        self._handed_over[operation.sequence] = operation
        if operation.sequence in self._unreported:
            return True
        return self._handed_over.pop(operation.sequence, None) is None

    def _failure(self, entry: EntryPoint, arguments: tuple[Any, ...], result: Result, *, is_found: bool) -> None:
        """Report that a call failed; `is_found`: a finding says so, too."""
        why = self._machine.last_message()
        text = f"{entry.name} returned {result.c_name}{': ' if why else ''}{why}"
        # A program that does not look at the result goes on without the work. In a failed context, all calls fail.
        is_work = entry.name.startswith(_ENQUEUES_WORK) and not is_found and not self._failed
        flags = WarningFlag.UNSEEN if is_work else 0
        hooks.emit(Kind.WARNING, name=text, flags=flags, aux0=WarningCode.CALL_FAILED)
        if result.name == "OUT_OF_MEMORY" and entry.name in sim_memory.ALLOCATE:
            sim_memory.out_of_memory(self._calls, dict(zip(entry.parameters, arguments, strict=True)))

    def _execution(self, operation: Operation) -> None:
        sequence = operation.sequence
        if sequence in self._unreported and self._hand_over(operation):
            return
        correlation, stream = self._owners.pop(sequence, (0, 0))
        kind = operation.kind
        if kind == "graph_end" and operation.launch is not None:
            self._launches.pop(operation.launch.sequence, None)
        if kind not in _WORK or not correlation:
            return
        is_kernel = kind == "kernel"
        context = operation.stream.context
        ordinal = context.device.ordinal
        if operation.footprint:
            with self.blocks.measured() if self.blocks is not None else nullcontext():
                self._accesses(operation, ordinal, correlation)
        if operation.findings:
            self._findings(operation, device=ordinal, stream=stream, correlation=correlation)
        hooks.emit(
            _EXECUTION,
            device=ordinal,
            stream=stream,
            correlation=correlation,
            name=kernel_name(operation.name) if is_kernel else operation.name,
            flags=int(is_kernel and operation.launch is not None),
            address=operation.node,
            aux0=operation.start,
            aux1=operation.end,
            stack=0,
        )
        if context.error is not None:
            self._report_error(context)

    @staticmethod
    def _accesses(operation: Operation, device: int, correlation: int) -> None:
        for address, size, flags, aux0, aux1 in compress(operation.footprint, of_boxes=operation.kind != "kernel"):
            hooks.emit(
                _ACCESS,
                device=device,
                stream=operation.node,
                correlation=correlation,
                address=address,
                size=size,
                flags=flags,
                aux0=aux0,
                aux1=aux1,
                stack=0,
            )

    def _findings(self, operation: Operation, **who: int) -> None:
        for found in operation.findings:
            if found.is_gap:
                flag, code = _GAPS[found.kind]
                hooks.emit(
                    Kind.WARNING, name=found.text, flags=flag, correlation=who["correlation"], stack=0, aux0=code
                )
            else:
                self._finding(found, **who)

    def _report_error(self, context: Context) -> None:
        """Report once that a context has failed: nothing of it runs any more."""
        if context.error is None or context.handle in self._failed:
            return
        self._failed.add(context.handle)
        hooks.emit(
            Kind.WARNING,
            device=context.device.ordinal,
            name=f"work after {context.error.result.c_name} ({context.error})",
            flags=WarningFlag.UNSEEN,
            stack=0,
            aux0=WarningCode.WORK_AFTER_ERROR,
        )

    @staticmethod
    def _finding(found: CheckFinding, **who: int) -> None:
        rest = asdict(found)
        address, size, count = (rest.pop(name) for name in ("address", "size", "count"))
        text = json.dumps({key: value for key, value in rest.items() if value})
        hooks.emit(Kind.FINDING, name=text, address=address, size=size, aux0=count, **who)


# What reports a call. Those that programs make most get the arguments as they are, for a dictionary takes as
# long as an event.
_REPORT_OFTEN: Final[dict[str, Callable[[CallsInProgress, DriverCall, tuple[Any, ...]], None]]] = {
    "cuLaunchKernel": sim_work.launch,
    "cuLaunchCooperativeKernel": sim_work.launch,
    "cuLaunchKernelEx": sim_work.launch,
    "cuStreamSynchronize": sim_streams.stream_synchronize,
}
_REPORT: Final = sim_streams.REPORTS | sim_memory.REPORTS | sim_work.REPORTS | sim_graph_calls.REPORTS
_REPORT_ALIKE: Final = sim_work.REPORTS_ALIKE | sim_graph_calls.REPORTS_ALIKE


@cache
def _report_of(name: str) -> EmitCall:
    alike = (report for begin, report in _REPORT_ALIKE.items() if name.startswith(begin))
    return _REPORT.get(name) or next(alike, _other)


def _other(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    """Say of a call that no event describes that it enqueued accesses, if it did."""
    operation = calls.thread.call.operation
    if operation is not None and operation.kind in _TOUCHES_MEMORY:
        not_recorded(calls, values, name)


def _as_host_function(run: Callable[[Operation], None], correlation: int) -> Callable[[Operation], None]:
    """Wrap `run` so that what it does is attributed to its operation."""

    def called(operation: Operation) -> None:
        with hooks.host_function(correlation, operation.node):
            run(operation)

    return called
