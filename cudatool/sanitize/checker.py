"""From a trace to a report: run the engine, try the repairs of what it found, and look at what is left open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from cudatool.limits import REPORT_FRAMES
from cudatool.sanitize.callers import Callers
from cudatool.sanitize.coverage import LeftOpen, find_gaps, operations_in
from cudatool.sanitize.defects import Defect, Key, Repairs
from cudatool.sanitize.device import device_findings, leaks
from cudatool.sanitize.effort import Effort
from cudatool.sanitize.engine import Engine
from cudatool.sanitize.findings import Finding, FindingKind, Report
from cudatool.sanitize.kinds import KINDS, named_checks
from cudatool.sanitize.stack_depths import within
from cudatool.sanitize.wording import Words
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace
from cudatool.units import counted

__all__ = ["check"]

_RACES = (FindingKind.RACE_RAW, FindingKind.RACE_WAR, FindingKind.RACE_WAW)
# Each is one operation in stream order.
_PLAIN_WORK = frozenset({Kind.KERNEL_LAUNCH, Kind.GEMM, Kind.MEMCPY, Kind.MEMSET})
_NO_REPAIR = (FindingKind.CAPTURE_MISSED, FindingKind.CAPTURED_EVENT)


def check(
    trace: Trace,
    checks: str | Collection[str] = ("race",),
    *,
    bounded: bool = False,
    beside: Collection[int] = (),
    since: int = 0,
    accepts: Callable[[Report], bool] = lambda report: False,
) -> Report:
    """Return every access of `trace` that CUDA's rules leave in no order with another one or with its memory's life.

    Also what the software device's checkers recorded; and, if `checks` has "leak", memory that was never given back.
    Without "race" there is no look at the order of accesses. What `checks` asks for and the trace cannot tell is among
    the report's gaps.

    The findings are independent of each other: what would vanish with an earlier one's repair is only counted, or in
    ``dependent`` where that is asked for.
    The repairs have been applied to the trace and the check repeated, unless it is certain what that would show: a
    repair is named only if its finding is gone with it.
    Nothing depends on the order in which the work happened to run.

    Parameters
    ----------
    trace
        What was recorded.
    checks
        What to look for: names of :data:`~cudatool.sanitize.kinds.CHECKS`, in a list or in a text.
    bounded
        Whether the work is limited by the number of events, and the report in its stacks, for a file that a stranger
        may have made.
    beside
        Ids of the processes that the program started and whose traces are checked, too: they are no gaps.
    since
        The record that the report begins with. What comes before is its past: no findings, and no possible races, whose
        later side is there.
    accepts
        Whether races of the report are going to be set aside: then dependent ones are looked for, of which there may
        be as many as pairs of accesses.

    Raises
    ------
    TraceFormatError
        `bounded`, and the check would take more work.
    UsageError
        There is no such check.
    """
    checks = named_checks(checks)
    report = _report(trace, checks, Effort(trace, bounded=bounded), beside, since)
    if report.findings and accepts(report):
        report = _report(trace, checks, Effort(trace, bounded=bounded), beside, since, with_dependent=True)
    return within(report, REPORT_FRAMES) if bounded else report


def _of_kernels(trace: Trace, checks: Collection[str], since: int) -> Report:
    """Return a report of what the device's checkers saw, and of leaks."""
    found = device_findings(trace) + (leaks(trace) if "leak" in checks else ())
    found = tuple(one for one in found if one.record >= since)
    on_device = tuple(one for one in found if KINDS[one.kind].fails)
    warnings = tuple(one for one in found if not KINDS[one.kind].fails)
    return Report((), on_device=on_device, device=str(trace.header.get("device", "")), warnings=warnings)


def _report(
    trace: Trace,
    checks: Collection[str],
    effort: Effort,
    beside: Collection[int],
    since: int,
    *,
    with_dependent: bool = False,
) -> Report:
    begun = _of_kernels(trace, checks, since)
    if "race" not in checks:
        operations = operations_in(trace)
        gaps = find_gaps(trace, checks, operations=operations, beside=beside)
        return replace(begun, operations=operations, notes=tuple(trace.notes), gaps=gaps)
    # With less order nothing is found less: what is sound however the host's threads are ordered needs no other look.
    apart = Engine(trace, one_host=False, go_on_repaired=True, effort=effort)
    apart.run()
    engine = apart
    if apart.threads > 1 and (apart.defects or apart.by_flags):
        engine = Engine(trace, go_on_repaired=True, effort=effort)
        engine.run()
    independent = engine.defects
    dependent: dict[Key, Defect] = {}
    cured: set[Key] = set()
    if independent:
        # What is said of a defect is that nothing orders its sides, not even the repair of another one.
        alone = Engine(trace, wanted=None if with_dependent else independent.keys(), effort=effort)
        alone.run()
        if with_dependent:
            dependent = {key: defect for key, defect in alone.defects.items() if key not in independent}
        independent = {key: defect.as_seen_by(alone.defects.get(key)) for key, defect in independent.items()}
        cured = _cured(trace, engine, independent, effort)

    words = Words(trace, engine)
    certain, possible = _findings(words, independent, cured, since)
    # Their repairs have not been tried: a finding names one only if that is known to help.
    behind, _ = _findings(words, dependent, (), since)
    return replace(
        begun,
        findings=certain,
        possible=possible,
        operations=engine.operations,
        unchecked_launches=engine.unchecked.total(),
        edges=dict(sorted(apart.ordering.edges.items())),
        notes=(*trace.notes, *_notes(engine)),
        gaps=find_gaps(
            trace,
            checks,
            operations=engine.operations,
            left_open=_left_open(trace, engine, apart, since),
            beside=beside,
        ),
        dependent=behind,
    )


def _findings(
    words: Words, defects: Mapping[Key, Defect], cured: Collection[Key], since: int
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the certain findings and the possible ones among defects whose second side is not before `since`."""
    certain: list[Finding] = []
    possible: list[Finding] = []
    for key, defect in defects.items():
        if defect.second.operation.record >= since:
            (certain if defect.is_certain else possible).append(words.finding(defect, repaired=key in cured))
    return tuple(certain), tuple(possible)


def _left_open(trace: Trace, engine: Engine, apart: Engine, since: int) -> LeftOpen:
    return LeftOpen(
        launches=engine.unchecked.total(),
        kernels=_without_arguments(trace.names[name] for name, _ in engine.unchecked.most_common()),
        streams=engine.unknown_streams,
        waits=_ordered_by_unknown(trace, engine, since),
        threads=_thread_pairs(trace, engine, apart, since),
        flags=_lines(trace, (pair for pair in engine.by_flags.values() if pair[1] >= since)),
    )


def _without_arguments(names: Iterable[str]) -> list[str]:
    """Return kernels' names without those of templates, each once: libraries' are some hundred characters long."""
    return list(dict.fromkeys(name.partition("<")[0] for name in names))


def _ordered_by_unknown(trace: Trace, engine: Engine, since: int) -> int:
    """Return how many pairs of call sites would race if waits for what the trace does not show ordered nothing."""
    if not engine.ordering.unknown:
        return 0
    without = Engine(trace, go_on_repaired=True, unknown_orders=False, effort=engine.effort)
    without.run()
    new = without.defects.keys() - engine.defects.keys()
    return sum(without.defects[key].second.operation.record >= since for key in new)


def _notes(engine: Engine) -> list[str]:
    notes = []
    if engine.ordering.unknown:
        waits = counted(engine.ordering.unknown, "wait")
        notes.append(f"{waits} for what the trace does not show, as another process's event")
    if empty := engine.ordering.empty:
        notes.append(f"{counted(empty, 'stream wait')} did nothing: the event had not been recorded")
    return notes


def _thread_pairs(trace: Trace, engine: Engine, apart: Engine, since: int) -> list[str]:
    """Return the lines of each possible race that is none if host threads hand work to each other properly.

    How they do is not in the trace, beyond what is recorded of locks and queues: `apart` has seen no order beyond that.
    """
    new = (defect for key, defect in apart.defects.items() if key not in engine.defects)
    recent = (defect for defect in new if defect.second.operation.record >= since)
    return _lines(trace, ((defect.first.record, defect.second.record) for defect in recent))


def _lines(trace: Trace, pairs: Iterable[tuple[int, int]]) -> list[str]:
    """Return the lines of pairs of records in words."""
    callers = Callers(trace)
    return [f"{callers.line(first, second)} and {callers.line(second, first)}" for first, second in pairs]


def _plan(engine: Engine, defects: Iterable[Defect]) -> Repairs:
    """One change of the program for each defect that a change of order can cure."""
    repairs = Repairs()
    for defect in defects:
        first, second = defect.first, defect.second
        if defect.kind in _NO_REPAIR:
            continue
        if defect.inside:
            repairs.edges |= defect.nodes
        elif defect.grouped:
            repairs.groups.add(int(engine.records["stack"][second.record]))
        elif engine.is_early(defect):
            repairs.serialized.add(int(engine.records["stack"][second.record]))
        elif first.mode == "free" or defect.kind is FindingKind.WAIT_UNRECORDED:
            continue  # no order helps; that of its race is tried
        elif defect.wait >= 0:
            stack = int(engine.records["stack"][defect.wait])
            _let_wait(repairs, stack, defect)
        elif (owner := defect.forgotten) is not None:
            stack = int(engine.records["stack"][owner])
            repairs.record_streams.setdefault(stack, set()).update(earlier for earlier, _ in defect.agents)
        else:
            _let_wait(repairs, int(engine.records["stack"][second.operation.record]), defect)
    return repairs


def _cured(trace: Trace, engine: Engine, defects: dict[Key, Defect], effort: Effort) -> set[Key]:
    """Return the defects that are gone with their repairs."""
    if _waits_cure(engine):
        return set(defects)
    repaired = Engine(trace, repairs=_plan(engine, defects.values()), effort=effort)
    repaired.run()
    # In a trace that contradicts itself, a repair may bring up what was hidden before.
    return defects.keys() - repaired.defects.keys()


def _waits_cure(engine: Engine) -> bool:
    """Whether it is certain, without another look at the trace, that all defects are gone with their repairs.

    So it is if each is a race of plain work on streams and is known exactly. The engine went on as if the second side
    had waited for the first one, each time, and found no more: all conflicts are among those. The repair waits, at
    the same call, for all that the first side's stream was given by then, which is at least as much. Order only grows.
    """
    if engine.ordering.unknown:
        return False
    streams = {agent.index for agent in engine.streams.values()}
    for key, defect in engine.defects.items():
        _, exact, _, one, other, *launches = key
        is_plain = exact and not launches and not defect.inside and not defect.grouped and defect.wait < 0
        agents = {agent for pair in defect.agents for agent in pair}
        if not (is_plain and defect.kind in _RACES and {one[0], other[0]} <= _PLAIN_WORK and agents <= streams):
            return False
    return True


def _let_wait(repairs: Repairs, stack: int, defect: Defect) -> None:
    for earlier, later in defect.agents:
        repairs.waits.setdefault((stack, later), set()).add(earlier)
