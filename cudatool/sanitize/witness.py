"""The proof of a race: two legal orders of the recorded work, and a byte in which their results differ.

::

    for each finding (first, second):
        replay the program's order                              -> what can be seen of it
        replay the order with second, and what must precede it, moved before first
        replay the order with first, and what must follow it, moved behind second
        replay pairs of orders that differ in this way, chosen by chance, while the budget lasts
        the first pair of which something can be seen to differ is the witness

What can be seen are the bytes that copies take to the host, those that the host reads in memory of its own, and what
the written memory holds in the end. Bytes are compared, so that a NaN equals itself.

The replay runs in a forked process, on the software device that recorded the work. It is trusted only if the order of
the run gives the bytes of the run, twice.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import struct
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cudatool.sanitize.findings import Finding, FindingKind, Report, Witness, WitnessStep, location
from cudatool.sanitize.legal import Order, Steps
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["Outcome", "Replayer", "Tape", "with_witnesses", "witness_lines"]

_SHOWN_BYTES = 16
_SHOWN_STEPS = 8
_ORDERS = 100  # for one finding
_SEEN_BYTES = 1 << 28  # of memory that is compared at the end of each replay
_GRACE_S = 15.0  # for the replay in progress when the budget ends
_RACES = (
    FindingKind.RACE_RAW,
    FindingKind.RACE_WAR,
    FindingKind.RACE_WAW,
    FindingKind.RACE_HOST,
    FindingKind.REUSE,
)


class Outcome(Protocol):
    """What can be seen of a replay: see :class:`cudatool.sim.tape.Outcome`."""

    copied: dict[tuple[int, int], bytes]
    read: dict[int, bytes]
    memory: dict[int, bytes]
    failure: tuple[int, str] | None


class Replayer(Protocol):
    """Runs recorded operations again: see :class:`cudatool.sim.tape.Replay`."""

    def run(self, order: Sequence[Any], memory: Iterable[tuple[int, int]] = ()) -> Any: ...
    def difference(self, outcome: Any) -> str: ...


class Tape(Protocol):
    """Recorded operations: see :class:`cudatool.sim.tape.Tape`."""

    refusal: str

    @property
    def entries(self) -> Sequence[Any]: ...
    def host_read(self, key: int, address: int, size: int) -> Any: ...
    def prepare(self) -> None: ...
    def fork(self) -> int: ...
    def replay(self) -> Replayer: ...


def with_witnesses(report: Report, trace: Trace, tape: Tape, *, budget_s: float) -> Report:
    """Return the report with a witness, or the reason why there is none, for each race.

    Parameters
    ----------
    report, trace
        Of the run that `tape` recorded.
    budget_s
        Seconds for all findings together.
    """
    races = [f for f in (*report.findings, *report.possible) if f.kind in _RACES]
    if not races:
        return report
    found: dict[str, Witness | str] = {}
    if tape.refusal:
        found = {finding.fingerprint: tape.refusal for finding in races}
    else:
        for fingerprint, result in _search_apart(races, trace, tape, budget_s):
            found[fingerprint] = result
    missing = f"none was found in {budget_s:g} seconds"

    def proven(finding: Finding) -> Finding:
        if finding.kind not in _RACES:
            return dataclasses.replace(finding, no_witness="only the order of accesses is replayed, not lifetimes")
        result = found.get(finding.fingerprint, missing)
        if isinstance(result, str):
            return dataclasses.replace(finding, no_witness=result)
        return dataclasses.replace(finding, witness=result)

    return dataclasses.replace(
        report,
        findings=tuple(proven(finding) for finding in report.findings),
        possible=tuple(proven(finding) for finding in report.possible),
    )


def _search_apart(
    races: list[Finding], trace: Trace, tape: Tape, budget_s: float
) -> Iterator[tuple[str, Witness | str]]:
    """Yield what a process of its own finds. What it does to memory, or to itself, is its own affair."""
    from multiprocessing.connection import Pipe

    deadline = time.monotonic() + budget_s
    tape.prepare()
    receiver, sender = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: forking while there are threads
        process = tape.fork()
    if not process:
        _search_and_exit(races, trace, tape, deadline, sender)
    sender.close()
    ended = ""
    try:
        while receiver.poll(max(deadline + _GRACE_S - time.monotonic(), 0)):
            yield receiver.recv()
    except EOFError:
        ended = "the replay was ended by the operating system"
    finally:
        receiver.close()
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    if ended and os.WIFSIGNALED(status):
        yield "", ended


def _search_and_exit(races: list[Finding], trace: Trace, tape: Tape, deadline: float, sender: Connection) -> None:
    """Be the process that replays."""
    status = 1
    try:
        gc.disable()  # no handle may be destroyed here: the driver is not for forked processes
        search = _Search(trace, tape, deadline)
        for finding in races:
            sender.send((finding.fingerprint, search.witness(finding)))
        status = 0
    finally:
        sender.close()
        os._exit(status)


@dataclass(frozen=True, slots=True)
class _Difference:
    """Something seen to differ: by which step, or in memory at the end, or because one order failed."""

    address: int
    before: bytes
    after: bytes
    step: int | None
    failure: str = ""


class _OutOfTime(Exception):
    pass


class _Search:
    """Replays of one tape."""

    def __init__(self, trace: Trace, tape: Tape, deadline: float) -> None:
        self._trace = trace
        self._tape = tape
        self._deadline = deadline
        self._steps = steps = Steps(trace)
        self._replayer = tape.replay()
        self._replays = 0
        self._cached: tuple[Order, Any] | None = None
        owned: dict[int, list[int]] = {}
        for index, entry in enumerate(tape.entries):
            owned.setdefault(entry.owner, []).append(index)
        self._todo: list[list[Any]] = []
        self._step_of_entry: dict[int, int] = {}
        for index, step in enumerate(steps.all):
            entries: list[Any] = owned.pop(step.correlation, []) if step.correlation else []
            self._step_of_entry.update(dict.fromkeys(entries, index))
            if step.kind is Kind.HOST_ACCESS:
                entries = [tape.host_read(index, a.start, a.stop - a.start) for a in step.accesses if a.mode & 1]
            self._todo.append(entries)
        self._memory = steps.memory_written()
        if sum(size for _, size in self._memory) > _SEEN_BYTES:
            self._memory = []
        self._refusal = ""
        if owned:
            names = {tape.entries[entries[0]].name for entries in owned.values()}
            self._refusal = f"the trace does not say when {', '.join(sorted(names))} may run"
        self._checked = False

    # ---- looking for a witness ----

    def witness(self, finding: Finding) -> Witness | str:
        """Return the witness of a finding, or why there is none."""
        first, second = (self._steps.of_record.get(side.record) for side in (finding.first, finding.second))
        if first is None or second is None:
            return "only the order of operations is replayed, and one side is none"
        for index, side in ((first, finding.first), (second, finding.second)):
            if reason := self._cannot_move(index):
                return f"{side.operation} {reason}"
        try:
            if not self._checked:
                self._check_itself()
            if self._refusal:
                return self._refusal
            before = self._replays
            for earlier, later in self._pairs(finding, first, second):
                for order, other in self._swaps(earlier, later):
                    found = self._compare(finding, order, other)
                    if found is not None:
                        return self._explain(finding, (earlier, later), order, other, found, self._replays - before)
        except _OutOfTime:
            return "none was found in the time that there was"
        tried = self._replays - before
        if not tried:
            return "no legal order exchanges the two: the memory was handed out again between them"
        return f"{_count(tried, 'replay')} of legal orders gave the same bytes everywhere"

    def _cannot_move(self, index: int) -> str:
        """Say why a replay cannot run a step at another time; nothing if it can."""
        step, todo = self._steps.all[index], self._todo[index]
        if step.kind is Kind.HOST_ACCESS:
            return "" if todo else "writes what only the host knows: it cannot be replayed at another time"
        if not todo:
            return "is not on the tape: nothing says how to do it again"
        if any(self._tape.entries[entry].kind == "host" for entry in todo):
            return "calls a function of the host, which is not called again"
        return ""

    def _check_itself(self) -> None:
        """See that the order of the run gives the bytes of the run, and the program's order the same bytes twice."""
        self._checked = True
        if self._refusal:
            return
        outcome = self._replayer.run(range(len(self._tape.entries)), ())
        if difference := self._replayer.difference(outcome):
            self._refusal = f"the replay cannot be trusted: the order of the run {difference}"
            return
        order = self._steps.program_order()
        first = self._run(order)
        self._cached = None
        difference_found = self._difference(order, first, self._run(order), range(0))
        if difference_found is not None:
            self._refusal = "the kernels' results are not reproducible: one order gives other bytes each time"

    def _pairs(self, finding: Finding, first: int, second: int) -> Iterator[tuple[int, int]]:
        """Yield the pair that was reported."""
        yield first, second

    def _swaps(self, first: int, second: int) -> Iterator[tuple[Order, Order]]:
        """Yield pairs of legal orders: one with `first` before `second`, the other one the other way round."""
        steps = self._steps
        if first in steps.before(second):
            return
        order = steps.program_order()
        yield order, steps.advanced(order, second)
        yield order, steps.delayed(order, first, second)
        choose = random.Random(0)
        seen = {tuple(order)}
        for number in range(_ORDERS // 2):
            order = steps.any_order(choose)
            if tuple(order) in seen:
                if number >= len(seen) * 4:
                    return  # there are few orders, and they have been tried
                continue
            seen.add(tuple(order))
            earlier, later = sorted((first, second), key=order.index)
            yield order, steps.delayed(order, earlier, later)

    def _run(self, order: Order) -> Any:
        if self._cached is not None and self._cached[0] == order:
            return self._cached[1]
        if time.monotonic() > self._deadline:
            raise _OutOfTime
        self._replays += 1
        outcome = self._replayer.run([task for step in order for task in self._todo[step]], self._memory)
        self._cached = order, outcome
        return outcome

    def _compare(self, finding: Finding, order: Order, other: Order) -> _Difference | None:
        """Return the first difference that can be seen between two orders."""
        one = self._run(order)
        another = self._run(other)
        self._cached = order, one  # the next pair begins with it again
        return self._difference(order, one, another, range(finding.start, finding.start + finding.size))

    def _difference(self, order: Order, one: Any, other: Any, preferred: range) -> _Difference | None:
        if one.failure != other.failure and not (one.failure and other.failure):
            entry, text = one.failure or other.failure
            return _Difference(preferred.start, b"", b"", self._step_of_entry[entry], text)
        for step in order:
            for task in self._todo[step]:
                if not isinstance(task, int):
                    if one.read[step] != other.read[step]:
                        return _first(task.address, one.read[step], other.read[step], step)
                    continue
                for key, copied in one.copied.items():
                    if key[0] == task and copied != other.copied[key]:
                        return _first(key[1], copied, other.copied[key], step)
        found = None
        for address, held in one.memory.items():
            if held != other.memory[address]:
                for start, stop in ((preferred.start, preferred.stop), (address, address + len(held))):
                    part = slice(max(start - address, 0), max(stop - address, 0))
                    if held[part] != other.memory[address][part]:
                        place = address + (part.start or 0)
                        difference = _first(place, held[part], other.memory[address][part], None)
                        if start == preferred.start:
                            return difference
                        found = found or difference
        return found

    # ---- telling it ----

    def _explain(
        self,
        finding: Finding,
        pair: tuple[int, int],
        order: Order,
        other: Order,
        found: _Difference,
        replays: int,
    ) -> Witness:
        start, stop = finding.start, finding.start + finding.size
        key = [*pair, *([found.step] if found.step is not None else [])]
        involved = [i for i, step in enumerate(self._steps.all) if step.touches(start, stop) and i not in key]
        middle = sum(pair) / 2
        near = sorted(involved, key=lambda index: abs(index - middle))[: _SHOWN_STEPS - len(set(key))]
        shown = {*key, *near}
        return Witness(
            order_a=tuple(self._step(index) for index in order if index in shown),
            order_b=tuple(self._step(index) for index in other if index in shown),
            steps=len(order),
            exchanged=(self._record(pair[0]), self._record(pair[1])),
            address=found.address,
            bytes_a=found.before.hex(" "),
            bytes_b=found.after.hex(" "),
            observed_at=self._observed(finding, found),
            replays=replays,
        )

    def _observed(self, finding: Finding, found: _Difference) -> str:
        if found.failure:
            return f"only one of them fails: {found.failure}"
        if found.step is None:
            inside = finding.buffer is not None and 0 <= found.address - finding.buffer.address < finding.buffer.size
            what = "the buffer" if inside else "memory"
            return f"what {what} holds in the end, which nothing copied to the host"
        step = self._step(found.step)
        verb = "reads" if self._steps.all[found.step].kind is Kind.HOST_ACCESS else "copies to the host"
        return f"what {step.operation} ({step.location}) {verb}"

    def _record(self, index: int) -> int:
        return self._steps.all[index].operation.record

    def _step(self, index: int) -> WitnessStep:
        step = self._steps.all[index]
        record = self._trace.records[step.operation.record]
        name = self._trace.names[int(record["name"])]
        if step.kind is Kind.KERNEL_LAUNCH:
            name = f"kernel {name}"
        stack = self._trace.stack(int(record["stack"]))
        return WitnessStep(
            operation=name or step.kind.name.lower().replace("_", " "),
            agent=self._steps.agents[step.operation.agent].label,
            location=location(stack),
            record=step.operation.record,
        )


def witness_lines(witness: Witness) -> Iterator[tuple[str, str]]:
    """Yield a witness as lines of a report: indent and text."""
    yield "   ", f"witness: two legal orders differ in {witness.observed_at}"
    whole = len(witness.order_a) == witness.steps
    for number, order, held in ((1, witness.order_a, witness.bytes_a), (2, witness.order_b, witness.bytes_b)):
        yield (
            "     ",
            f"order {number}" + (":" if whole else f", the part that matters of {witness.steps:,} operations:"),
        )
        for step in order:
            mark = "*" if step.record in witness.exchanged else " "
            yield "     ", f"{mark} {step.operation} on {step.agent} ({step.location})"
        if held:
            yield "     ", f"gives at 0x{witness.address:x}: {held}{_as_numbers(held)}"


def _as_numbers(held: str) -> str:
    """Return the first word as numbers, of which one may be what the program means."""
    word = bytes.fromhex(held)[:4]
    if len(word) < 4:
        return ""
    return f" (int32 {int.from_bytes(word, 'little', signed=True)}, float32 {struct.unpack('<f', word)[0]:g})"


def _first(address: int, one: bytes, other: bytes, step: int | None) -> _Difference:
    """Return the first word in which the two differ, and what follows it."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    at -= (address + at) % 4 if at >= (address + at) % 4 else 0
    part = slice(at, at + _SHOWN_BYTES)
    return _Difference(address + at, one[part], other[part], step)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
