"""The work of the check grows with the number of operations, however many streams there are: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sanitize_program import Program, R, W

from cudatool.errors import TraceFormatError
from cudatool.sanitize import check
from cudatool.sanitize.clocks import Clocks, Moment
from cudatool.sanitize.effort import Effort
from cudatool.sanitize.engine import Engine
from cudatool.trace.events import Kind, StreamFlag
from cudatool.trace.model import Trace

LINE = 1000


class Counted(Effort):
    """Counts the units, and takes none away."""

    __slots__ = ("spent",)

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.counts = True
        self.spent = 0

    def spend(self, units: int) -> None:
        self.spent += units


def in_a_loop(program: Program, streams: int) -> None:
    for _ in range(streams):
        stream = program.stream()
        program.kernel(stream, (R, 1000, 100), (W, 2000, 100), line=LINE)
        program.synchronize(stream=stream)


def forked_and_joined(program: Program, streams: int) -> None:
    first, *others = (program.stream() for _ in range(streams))
    for _ in range(2):
        program.kernel(first, (W, 1000, 100), line=LINE)
        program.record(1, first)
        for stream in others:
            program.wait(stream, 1)
            program.kernel(stream, (R, 1000, 100), (W, 10_000 * stream, 100), line=LINE)
            program.record(stream, stream)
        for stream in others:
            program.wait(first, stream)


def between_device_synchronizations(program: Program, streams: int) -> None:
    made = [program.stream() for _ in range(streams)]
    for _ in range(2):
        for stream in made:
            program.kernel(stream, (R, 1000, 100), (W, 10_000 * stream, 100), line=LINE)
        program.synchronize(device=0)


def beside_the_legacy_stream(program: Program, streams: int) -> None:
    legacy = program.stream(StreamFlag.LEGACY_DEFAULT)
    for stream in [program.stream(StreamFlag(0)) for _ in range(streams)]:
        program.kernel(stream, (W, 1000, 100), line=LINE)
        program.kernel(legacy, (W, 1000, 100), line=LINE)


def racing(program: Program, streams: int) -> None:
    for stream in [program.stream() for _ in range(streams)]:
        program.kernel(stream, (W, 1000, 100), line=LINE)


def read_by_all_before_a_racing_write(program: Program, streams: int) -> None:
    made = [program.stream() for _ in range(streams)]
    for mode in (R, W):
        for stream in made:
            program.kernel(stream, (mode, 1000, 100), line=LINE + mode)


@pytest.mark.parametrize(
    "build",
    [
        in_a_loop,
        forked_and_joined,
        between_device_synchronizations,
        beside_the_legacy_stream,
        racing,
        read_by_all_before_a_racing_write,
    ],
    ids=lambda build: build.__name__,
)
def test_work_is_linear_in_the_number_of_streams(build: Callable[[Program, int], None]) -> None:
    spent = []
    for streams in (300, 1200):
        program = Program()
        build(program, streams)
        trace = program.trace()
        effort = Counted(trace)
        Engine(trace, go_on_repaired=True, effort=effort).run()
        spent.append(effort.spent)
    assert spent[1] < 6 * spent[0]


@pytest.mark.parametrize("streams", [20, 200])
def test_race_of_many_streams_is_one_finding_with_a_repair(streams: int) -> None:
    program = Program()
    racing(program, streams)
    (finding,) = check(program.trace()).findings
    assert streams - 1 == finding.count
    assert finding.repair


def test_check_of_a_strangers_file_gives_up() -> None:
    effort = Effort(Program().trace(), bounded=True)
    effort.spend(1000)
    with pytest.raises(TraceFormatError, match="cannot be checked for races"):
        effort.spend(1 << 30)


def test_what_the_host_has_waited_for_is_forgotten() -> None:
    program = Program()
    stream = program.stream()
    for buffer in range(20_000):
        program.emit(Kind.KERNEL_LAUNCH, stream=stream, correlation=buffer + 1, line=LINE)
        program.emit(Kind.ACCESS, correlation=buffer + 1, flags=W, address=buffer * 1000, size=100, line=LINE)
        if buffer % 100 == 99:
            program.emit(Kind.STREAM_SYNCHRONIZE, stream=stream, line=LINE)
    engine = Engine(program.trace())
    engine.run()
    assert len(engine.history) < 10_000


def test_clock_of_many_agents_is_the_clock_of_few() -> None:
    program = Program()
    effort = Effort(program.trace())
    few, many = Clocks(20, effort), Clocks(2000, effort)
    for clocks in (few, many):
        one = clocks.join(3, 1, clocks.nothing, Moment(7, 5, clocks.nothing))
        two = clocks.join(4, 1, clocks.nothing, Moment(3, 1, one))
        assert [0, 0, 0, 1, 0, 0, 0, 5] == list(two)[:8]
        assert one == clocks.join(3, 2, one, Moment(7, 4, clocks.nothing))
        assert [0, 0, 0, 1, 0, 0, 0, 5, 0] == [two[agent] for agent in range(9)]
