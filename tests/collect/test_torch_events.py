"""From the log of a PyTorch program to events, without PyTorch: the order, the memory, the graphs."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from cudatool.collect.torch_accesses import Argument, make_plan
from cudatool.collect.torch_events import TorchEvents
from cudatool.collect.torch_rows import Action, Note, RowKind, TraceCall
from cudatool.sanitize import Gap, GapKind, check
from cudatool.trace import hooks, read
from cudatool.trace.events import AccessFlag, Event, Kind, StreamFlag, WarningCode, WarningFlag
from cudatool.trace.recorder import Recorder

SELF, SRC, RESULT = Argument("self"), Argument("src"), Argument("")
CHANGED = Argument("self", is_written=True)
SCHEMAS = {
    "": ([], []),
    "aten::relu": ([SELF], [RESULT]),
    "aten::fill_.Scalar": ([CHANGED], [CHANGED]),
    "aten::copy_": ([CHANGED, SRC], [CHANGED]),
    "aten::record_stream": ([SELF], []),
    "c10d::allreduce_": ([Argument("tensors"), Argument("process_group")], [RESULT, RESULT]),
    "c10d::_allgather_base_": ([Argument("output_tensor"), Argument("input_tensor")], [RESULT, RESULT]),
    "c10d::broadcast_": ([Argument("tensors"), Argument("process_group")], [RESULT, RESULT]),
    "my_kernel": ([], []),
}
NAMES = list(SCHEMAS)
A, B, HOST = 0x10000, 0x20000, 0x7000000  # addresses
SIDE = 0x500  # a stream's handle


@pytest.fixture(autouse=True)
def clean_hooks() -> Iterator[None]:
    hooks.reset()
    hooks.strict = True
    yield
    hooks.reset()


def row(kind, *words, thread=1):
    return [kind | (2 + len(words)) << 8 | thread << 40, 0, *words]


def log(*rows):
    words = [word for one in rows for word in one]
    return struct.pack(f"<{len(words)}Q", *words)


def tensor(address, *, size=1024, position=0, result=False, where="device", device=0, stream=0):
    place = {"device": 1 << 16, "pinned": 1 << 17, "pageable": 0}[where]
    head = position | result << 8 | place | device << 24 | 1 << 32 | 1 << 48
    return [head, address, address, size, stream, size, 1]


def payload(number, name, *tensors, extra=0):
    words = [word for one in tensors for word in one]
    return row(RowKind.PAYLOAD, number, NAMES.index(name), 0, extra, len(tensors), *words)


def call(number, payload_number, *, stack=0, thread=1):
    return row(RowKind.CALL, number, payload_number, stack, thread=thread)


def begin(number, *, thread=1):
    return row(RowKind.BEGIN, number, thread=thread)


def memory(action, address, *, size=1024, stream=0, device=0, number=0, stack=0, pool=0, thread=1):
    return row(RowKind.MEMORY, action, address, size, stream, device, number, stack, pool, thread=thread)


def trace(what, first=0, second=0, *, device=0, stack=0):
    return row(RowKind.TRACE, what, first, second, device, stack)


def note(what, *words):
    return row(RowKind.NOTE, 0, what, *words)


POOL = 7 << 32  # of graphs
ALLOC, REQUESTED, COMPLETED = Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED


def plan_of(name):
    return make_plan(name, *SCHEMAS[name])


def kept_in(found):
    def keep(rows, names):
        for time, kind, device, flags, thread, _, stream, correlation, stack, name, *rest in rows.tolist():
            found.append(Event(time, Kind(kind), device, flags, thread, stream, correlation, stack, names[name], *rest))

    return keep


def all_events(*rows):
    found = []
    reader = TorchEvents(kept_in(found), plan_of, lambda: NAMES)
    reader.read(log(*rows))
    reader.finish()
    return found


def events(*rows):
    return [event for event in all_events(*rows) if event.kind is not Kind.STREAM_CREATE]


def kinds(*rows):
    return [event.kind for event in events(*rows) if event.kind is not Kind.ACCESS]


def check_rows(path, *rows):
    with Recorder(path / "t.ctrace", header={}):
        reader = TorchEvents(hooks.forward_rows, plan_of, lambda: NAMES)
        reader.read(log(*rows))
        reader.finish()
    return check(read(path / "t.ctrace"))


def test_operator_is_a_launch_with_its_accesses():
    launch, first, second = events(
        payload(1, "aten::relu", tensor(A, stream=SIDE), tensor(B, result=True, stream=SIDE)), call(1, 1, stack=0)
    )
    assert (launch.kind, launch.name) == (Kind.KERNEL_LAUNCH, "aten::relu")
    assert [(a.address, a.size, a.flags, a.name) for a in (first, second)] == [
        (A, 1024, AccessFlag.READ, "self"),
        (B, 1024, AccessFlag.WRITE, ""),
    ]
    assert {event.correlation for event in (launch, first, second)} == {launch.correlation}
    assert {event.stream for event in (launch, first, second)} == {hooks.stream_id(0, SIDE)}


def test_host_waits_after_the_copy_in_which_it_waits():
    found = kinds(
        begin(1),
        trace(TraceCall.STREAM_SYNCHRONIZE, 0),
        payload(1, "aten::copy_", tensor(HOST, where="pageable"), tensor(A, position=1)),
        call(1, 1),
    )
    assert found == [Kind.MEMCPY, Kind.STREAM_SYNCHRONIZE]


def test_operator_that_waits_inside_and_returns_a_tensor_goes_on_after_it():
    found = kinds(
        begin(1),
        trace(TraceCall.STREAM_SYNCHRONIZE, 0),
        payload(1, "aten::relu", tensor(A), tensor(B, result=True)),
        call(1, 1),
    )
    assert found == [Kind.KERNEL_LAUNCH, Kind.STREAM_SYNCHRONIZE, Kind.KERNEL_LAUNCH]


def test_what_other_threads_do_meanwhile_does_not_wait():
    found = kinds(
        begin(1, thread=1),
        payload(1, "aten::relu", tensor(A)),
        payload(2, "aten::fill_.Scalar", tensor(B)),
        call(2, 2, thread=2),
        trace(TraceCall.DEVICE_SYNCHRONIZE),
        call(1, 1, thread=1),
    )
    assert found == [Kind.KERNEL_LAUNCH, Kind.KERNEL_LAUNCH, Kind.DEVICE_SYNCHRONIZE]


def test_copy_between_devices_lies_between_its_waits():
    source_stream, target_stream = SIDE, 0x600
    found = kinds(
        begin(1),
        trace(TraceCall.EVENT_RECORD, 0xE1, target_stream, device=1),
        trace(TraceCall.EVENT_WAIT, 0xE1, source_stream),
        trace(TraceCall.EVENT_RECORD, 0xE2, source_stream),
        trace(TraceCall.EVENT_WAIT, 0xE2, target_stream, device=1),
        payload(
            1,
            "aten::copy_",
            tensor(B, device=1, stream=target_stream),
            tensor(A, position=1, stream=source_stream),
        ),
        call(1, 1),
    )
    record, wait = Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT
    assert found == [record, wait, Kind.MEMCPY, record, wait]


GROUPS = 0x700  # the handle of the stream of a process group


def collective(number, name, *tensors, inside):
    """Rows of a collective: it waits for the current stream's work, runs, and records its end."""
    return [begin(number), *inside, payload(number, name, *tensors), call(number, number)]


WAITS = [trace(TraceCall.EVENT_RECORD, 0xE1, 0), trace(TraceCall.EVENT_WAIT, 0xE1, GROUPS)]
ENDS = trace(TraceCall.EVENT_RECORD, 0xE2, GROUPS)
WORK_WAIT = trace(TraceCall.EVENT_WAIT, 0xE2, 0)
GATHERED = [tensor(B, result=False), tensor(A, position=1), tensor(B, result=True)]


def filled(number, address):
    return [payload(number, "aten::fill_.Scalar", tensor(address)), call(number, number)]


def memory_taken():
    return [memory(Action.ALLOC, A), memory(Action.ALLOC, B)]


def test_a_collective_runs_on_its_groups_stream_between_its_wait_and_its_end():
    found = events(*collective(1, "c10d::allreduce_", tensor(A), inside=[*WAITS, trace(2, 0xE0, GROUPS), ENDS]))
    kinds = [event.kind for event in found if event.kind is not Kind.ACCESS]
    record, wait = Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT
    assert [record, wait, Kind.KERNEL_LAUNCH, record, record] == kinds
    launch, access = (event for event in found if event.correlation)
    assert launch.stream == access.stream == hooks.stream_id(0, GROUPS)
    assert access.flags == AccessFlag.READ | AccessFlag.WRITE


@pytest.mark.parametrize(
    ("then", "races"),
    [
        ([*filled(2, A), WORK_WAIT], ["race-war"]),  # its input is changed
        ([*filled(2, B), WORK_WAIT], ["race-waw"]),
        ([WORK_WAIT, *filled(2, A), *filled(3, B)], []),
        ([], []),
    ],
)
@pytest.mark.parametrize("coalesced", [False, True])
def test_what_a_collective_uses_is_free_once_its_work_was_waited_for(tmp_path, then, races, coalesced):
    inside = WAITS if coalesced else [*WAITS, ENDS]  # else the end of all is recorded after the last
    after = [ENDS] if coalesced else []
    gathers = collective(1, "c10d::_allgather_base_", *GATHERED, inside=inside)
    report = check_rows(tmp_path, *memory_taken(), *filled(9, A), *gathers, *after, *then)
    assert races == [finding.kind for finding in report.findings]
    assert not report.possible and not report.unchecked_launches


def test_a_collective_that_does_not_run_beside_is_in_the_order_of_the_current_stream(tmp_path):
    gathers = collective(1, "c10d::_allgather_base_", *GATHERED, inside=[trace(TraceCall.EVENT_RECORD, 0xE2, 0)])
    report = check_rows(tmp_path, *memory_taken(), *filled(9, A), *gathers, *filled(2, A), *filled(3, B))
    assert not report.findings + report.possible and not report.unchecked_launches


def test_of_a_broadcast_only_the_root_knows_whether_it_reads(tmp_path):
    sends = collective(1, "c10d::broadcast_", tensor(A), inside=[*WAITS, ENDS])
    report = check_rows(tmp_path, *memory_taken(), *sends, *filled(2, A))
    assert not report.findings and report.possible


def test_a_collective_without_events_is_not_checked(tmp_path):
    report = check_rows(tmp_path, *memory_taken(), *collective(1, "c10d::allreduce_", tensor(A), inside=[]))
    assert report.unchecked_launches == 1


def test_allocation_has_the_stack_of_its_operator_and_comes_first():
    allocation, launch, _, _ = events(
        begin(1),
        memory(ALLOC, B, number=1),
        payload(1, "aten::relu", tensor(A), tensor(B, result=True)),
        call(1, 1, stack=77),
    )
    assert (allocation.kind, allocation.size, allocation.aux0, allocation.stack) == (Kind.BLOCK_ALLOC, 1024, 1024, 77)
    assert launch.kind is Kind.KERNEL_LAUNCH


def test_free_outside_of_operators_has_its_own_stack():
    free, _ = events(memory(REQUESTED, A, stack=5), memory(COMPLETED, A))
    assert (free.kind, free.stack) == (Kind.BLOCK_FREE_REQUESTED, 5)


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024)])
def test_block_is_rounded_as_the_allocator_does(size, block):
    (allocation,) = events(memory(ALLOC, A, size=size))
    assert (allocation.size, allocation.aux0) == (block, size)


def test_operator_may_use_what_it_frees(tmp_path):
    rows = [
        memory(ALLOC, A),
        begin(1),
        memory(REQUESTED, A, number=1),
        memory(COMPLETED, A, number=1),
        payload(1, "aten::relu", tensor(A)),
        call(1, 1),
    ]
    assert kinds(*rows) == [
        Kind.BLOCK_ALLOC,
        Kind.KERNEL_LAUNCH,
        Kind.BLOCK_FREE_REQUESTED,
        Kind.BLOCK_FREE_COMPLETED,
    ]
    assert check_rows(tmp_path, *rows).findings == ()


def test_memory_that_an_operator_frees_and_takes_again_is_its_result(tmp_path):
    rows = [
        memory(ALLOC, A),
        begin(1),
        memory(REQUESTED, A, number=1),
        memory(COMPLETED, A, number=1),
        memory(ALLOC, A, number=1),
        payload(1, "aten::relu", tensor(A, result=True)),
        call(1, 1),
    ]
    assert kinds(*rows)[1:4] == [Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED, Kind.BLOCK_ALLOC]
    assert check_rows(tmp_path, *rows).findings == ()


def test_temporary_of_an_operator_ends_inside_of_it():
    found = kinds(
        begin(1),
        memory(ALLOC, B, number=1),
        memory(REQUESTED, B, number=1),
        memory(COMPLETED, B, number=1),
        payload(1, "aten::relu", tensor(A)),
        call(1, 1),
    )
    assert found == [
        Kind.BLOCK_ALLOC,
        Kind.BLOCK_FREE_REQUESTED,
        Kind.BLOCK_FREE_COMPLETED,
        Kind.KERNEL_LAUNCH,
    ]


def reuse(*between):
    """A block of the default stream is read on the side stream, freed, and given out again."""
    return [
        row(RowKind.STREAM, SIDE, 0, 1),
        memory(ALLOC, A),
        payload(1, "aten::relu", tensor(A, stream=SIDE)),
        call(1, 1),
        *between,
        memory(ALLOC, A),
        payload(2, "aten::fill_.Scalar", tensor(A)),
        call(9, 2),
    ]


def test_block_that_a_stream_may_still_use_is_found(tmp_path):
    report = check_rows(tmp_path, *reuse(memory(REQUESTED, A), memory(COMPLETED, A)))
    assert [finding.kind for finding in report.findings] == ["reuse"]


def test_record_stream_names_the_stream(tmp_path):
    rows = reuse(
        payload(3, "aten::record_stream", tensor(A), extra=SIDE),
        call(2, 3),
        memory(REQUESTED, A),
        trace(TraceCall.EVENT_DELETION, 0xE),
        memory(COMPLETED, A),
    )
    recorded = [event for event in events(*rows) if event.kind is Kind.BLOCK_RECORD_STREAM]
    assert next((event.address, event.stream) for event in recorded) == (A, hooks.stream_id(0, SIDE))
    assert check_rows(tmp_path, *rows).findings == ()


def test_free_that_does_not_complete_at_once_waits_for_every_stream(tmp_path):
    rows = reuse(memory(REQUESTED, A), memory(ALLOC, B), memory(COMPLETED, A))
    assert Kind.BLOCK_RECORD_STREAM in kinds(*rows)
    assert check_rows(tmp_path, *rows).findings == ()


def test_stream_is_non_blocking_if_it_was_created_so():
    found = all_events(
        row(RowKind.STREAM, SIDE, 0, 1),
        row(RowKind.STREAM, 0x600, 0, 0),
        *(note(Note.STREAM_QUERY, handle, 0, 0) for handle in (0, SIDE, 0x600)),
    )
    created = [event for event in found if event.kind is Kind.STREAM_CREATE]
    assert [event.flags for event in created] == [StreamFlag.LEGACY_DEFAULT, StreamFlag.NON_BLOCKING, 0]
    assert {0} == {event.time for event in created}, "when the program used it, not when the log was read"


def test_stream_is_of_the_device_on_which_it_was_seen_first():
    waits = [trace(TraceCall.STREAM_SYNCHRONIZE, SIDE, device=device) for device in (1, 0)]
    found = events(row(RowKind.STREAM, SIDE, 1, 1), *waits)
    assert {event.stream for event in found} == {hooks.stream_id(1, SIDE)}
    assert len({event.stream for event in events(*(trace(5, 0, device=device) for device in (1, 0)))}) == 2


def test_wait_for_an_event_that_was_never_recorded_is_a_wait():
    first, second = events(note(Note.EMPTY_WAIT, SIDE, 0), note(Note.EMPTY_WAIT, SIDE, 0))
    assert (first.kind, first.stream) == (Kind.STREAM_WAIT_EVENT, hooks.stream_id(0, SIDE))
    assert first.aux0 != second.aux0


def test_queries_say_whether_the_work_was_done():
    found = events(note(Note.EVENT_QUERY, 0xE, 1), note(Note.STREAM_QUERY, SIDE, 0, 0))
    assert [(event.kind, event.aux1) for event in found] == [(Kind.EVENT_QUERY, 1), (Kind.STREAM_QUERY, 0)]


def test_event_whose_handle_comes_again_is_another_one():
    first, _, second = events(
        trace(TraceCall.EVENT_RECORD, 0xE, 0),
        trace(TraceCall.EVENT_DELETION, 0xE),
        trace(TraceCall.EVENT_RECORD, 0xE, 0),
    )
    assert first.aux0 != second.aux0


def test_host_operator_is_an_access_of_the_host():
    (access,) = events(payload(1, "aten::relu", tensor(HOST, where="pinned")), call(1, 1))
    assert (access.kind, access.address, access.size, access.flags) == (Kind.HOST_ACCESS, HOST, 1024, AccessFlag.READ)


def graph_rows():
    return [
        row(RowKind.STREAM, SIDE, 0, 1),
        row(RowKind.STREAM, 0x600, 0, 1),
        note(Note.GRAPH_BEGIN, 1, SIDE, 0),
        memory(ALLOC, B, stream=SIDE),
        payload(1, "aten::relu", tensor(A, stream=SIDE), tensor(B, result=True, stream=SIDE)),
        call(1, 1),
        memory(REQUESTED, B, stream=SIDE),
        memory(COMPLETED, B, stream=SIDE),
        trace(TraceCall.EVENT_RECORD, 0xE, SIDE),
        trace(TraceCall.EVENT_WAIT, 0xE, 0x600),
        payload(2, "aten::fill_.Scalar", tensor(A + 4096, stream=0x600)),  # on a stream that joined the capture
        call(2, 2),
        trace(TraceCall.EVENT_DELETION, 0xE),
        note(Note.GRAPH_END, 1, SIDE, 0, POOL),
    ]


def test_captured_operators_run_when_the_graph_does():
    found = events(*graph_rows(), note(Note.GRAPH_LAUNCH, 1, 0, 0))
    shown = [event.kind for event in found if event.kind is not Kind.ACCESS]
    assert shown == [
        Kind.GRAPH_CAPTURE_BEGIN,
        Kind.EVENT_RECORD,
        Kind.STREAM_WAIT_EVENT,
        Kind.EVENT_DESTROY,
        Kind.GRAPH_CAPTURE_END,
        Kind.GRAPH_LAUNCH,
    ]
    touched = {(e.address, e.flags) for e in found if e.kind is Kind.ACCESS}
    assert touched == {(A, AccessFlag.READ), (B, AccessFlag.WRITE), (A + 4096, AccessFlag.WRITE)}
    launch = next(event for event in found if event.kind is Kind.GRAPH_LAUNCH)
    assert {e.correlation for e in found if e.kind is Kind.ACCESS} == {launch.correlation}


def test_stream_of_a_finished_capture_works_again():
    assert kinds(*graph_rows(), call(3, 1))[-1] is Kind.KERNEL_LAUNCH


def test_input_of_a_graph_that_another_stream_writes_is_found(tmp_path):
    write = [payload(3, "aten::fill_.Scalar", tensor(A, stream=0x700)), call(5, 3)]
    replay = note(Note.GRAPH_LAUNCH, 1, 0, 0)
    report = check_rows(tmp_path, *graph_rows(), row(RowKind.STREAM, 0x700, 0, 1), *write, replay)
    assert [finding.kind for finding in report.findings] == ["race-raw"]


@pytest.mark.parametrize(("pool", "expected"), [(POOL, []), (POOL + 1, ["use-after-free"] * 2)])
def test_memory_of_a_pool_that_a_graph_was_captured_into_is_used_on_by_who_keeps_the_graph(tmp_path, pool, expected):
    """PyTorch's cudagraph_trees copies inputs by address into tensors that it has let go of."""
    rows = [
        row(RowKind.STREAM, SIDE, 0, 1),
        memory(ALLOC, A, stream=SIDE, pool=pool),
        note(Note.GRAPH_BEGIN, 1, SIDE, 0),
        payload(1, "aten::relu", tensor(A, stream=SIDE), tensor(B, result=True, stream=SIDE)),
        call(1, 1),
        note(Note.GRAPH_END, 1, SIDE, 0, POOL),
        memory(REQUESTED, A, stream=SIDE, pool=pool),
        memory(COMPLETED, A, stream=SIDE, pool=pool),
        payload(2, "aten::fill_.Scalar", tensor(A, stream=SIDE)),
        call(2, 2),
        note(Note.GRAPH_LAUNCH, 1, SIDE, 0),
    ]
    assert expected == [finding.kind for finding in check_rows(tmp_path, *rows).findings]


@pytest.mark.parametrize("waits", ["", "before the launch", "after the launch"])
def test_external_event_that_a_graph_records_stands_for_its_launch(tmp_path, waits):
    event, reader = 0xF, 0x700
    wait = trace(TraceCall.EVENT_WAIT, event, reader)
    rows = [
        row(RowKind.STREAM, SIDE, 0, 1),
        row(RowKind.STREAM, reader, 0, 1),
        note(Note.GRAPH_BEGIN, 1, SIDE, 0),
        payload(1, "aten::fill_.Scalar", tensor(A, stream=SIDE)),
        call(1, 1),
        trace(TraceCall.EVENT_RECORD, event, SIDE),
        note(Note.GRAPH_END, 1, SIDE, 0, POOL),
        *([wait] if waits == "before the launch" else []),
        note(Note.GRAPH_LAUNCH, 1, SIDE, 0),
        *([wait] if waits == "after the launch" else []),
        payload(2, "aten::relu", tensor(A, stream=reader), tensor(B, result=True, stream=reader)),
        call(2, 2),
    ]
    expected = [] if waits == "after the launch" else ["race-raw"]
    assert expected == [finding.kind for finding in check_rows(tmp_path, *rows).findings]


@pytest.mark.parametrize("recorded", [True, False])
def test_external_event_that_a_graph_waits_for_orders_its_launch(tmp_path, recorded):
    event, writer = 0xF, 0x700
    rows = [
        row(RowKind.STREAM, SIDE, 0, 1),
        row(RowKind.STREAM, writer, 0, 1),
        trace(TraceCall.EVENT_RECORD, event, writer),
        note(Note.GRAPH_BEGIN, 1, SIDE, 0),
        trace(TraceCall.EVENT_WAIT, event, SIDE),
        payload(1, "aten::relu", tensor(A, stream=SIDE), tensor(B, result=True, stream=SIDE)),
        call(1, 1),
        note(Note.GRAPH_END, 1, SIDE, 0, POOL),
        payload(2, "aten::fill_.Scalar", tensor(A, stream=writer)),
        call(2, 2),
        *([trace(TraceCall.EVENT_RECORD, event, writer)] if recorded else []),
        note(Note.GRAPH_LAUNCH, 1, SIDE, 0),
    ]
    found = [finding.kind for finding in check_rows(tmp_path, *rows).findings]
    assert ([] if recorded else ["race-raw"]) == found


def test_event_recorded_anew_after_a_capture_stands_for_that_record(tmp_path):
    event, writer = 0xF, 0x700
    rows = [
        row(RowKind.STREAM, SIDE, 0, 1),
        row(RowKind.STREAM, writer, 0, 1),
        note(Note.GRAPH_BEGIN, 1, SIDE, 0),
        trace(TraceCall.EVENT_RECORD, event, SIDE),
        note(Note.GRAPH_END, 1, SIDE, 0, POOL),
        payload(1, "aten::fill_.Scalar", tensor(A, stream=writer)),
        call(1, 1),
        trace(TraceCall.EVENT_RECORD, event, writer),
        note(Note.GRAPH_LAUNCH, 1, SIDE, 0),
        trace(TraceCall.EVENT_WAIT, event, SIDE),
        payload(2, "aten::relu", tensor(A, stream=SIDE), tensor(B, result=True, stream=SIDE)),
        call(2, 2),
    ]
    assert [] == [finding.kind for finding in check_rows(tmp_path, *rows).findings]


def test_graph_with_something_unknown_is_not_checked(tmp_path):
    rows = [
        note(Note.GRAPH_BEGIN, 1, SIDE, 0),
        payload(1, "c10d::allreduce_", tensor(A, stream=SIDE)),
        call(1, 1),
        note(Note.GRAPH_END, 1, SIDE, 0, POOL),
        note(Note.GRAPH_LAUNCH, 1, 0, 0),
    ]
    assert check_rows(tmp_path, *rows).unchecked_launches == 1


def test_kernel_past_the_dispatcher_is_a_launch():
    flags = AccessFlag.READ | AccessFlag.INEXACT
    launch, access = events(note(Note.LAUNCH, NAMES.index("my_kernel"), SIDE, 0, A, 64, flags))
    assert (launch.kind, launch.name, launch.stream) == (Kind.KERNEL_LAUNCH, "my_kernel", hooks.stream_id(0, SIDE))
    assert (access.address, access.size, access.flags) == (A, 64, flags)


def test_operator_that_never_ends_loses_nothing_that_happened_inside():
    assert kinds(begin(1), trace(TraceCall.DEVICE_SYNCHRONIZE)) == [Kind.DEVICE_SYNCHRONIZE]


def test_a_free_that_is_complete_at_once_has_one_row():
    freed = [memory(ALLOC, A), memory(Action.FREED, A), memory(ALLOC, B), memory(REQUESTED, B), memory(COMPLETED, B)]
    asked, done, other_asked, other_done = (event for event in events(*freed) if event.kind is not Kind.BLOCK_ALLOC)
    assert (asked._replace(address=B), done._replace(address=B)) == (other_asked, other_done)


def test_a_free_inside_an_operator_comes_after_its_launch():
    rows = [payload(1, "aten::relu", tensor(A)), begin(1), memory(Action.FREED, A, number=1), call(1, 1)]
    assert [Kind.KERNEL_LAUNCH, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED] == kinds(*rows)


def test_a_value_that_is_too_wide_is_cut():
    assert [AccessFlag.READ] == [
        event.flags for event in events(note(Note.HOST_ACCESS, A, 4, 1 << 16 | AccessFlag.READ))
    ]


def test_payload_of_an_earlier_log_is_known_in_the_next():
    found = []
    reader = TorchEvents(kept_in(found), plan_of, lambda: NAMES)
    reader.read(log(payload(1, "aten::relu", tensor(A)), call(1, 1)))
    reader.read(log(call(2, 1)))
    assert [event.kind for event in found] == [Kind.STREAM_CREATE, *[Kind.KERNEL_LAUNCH, Kind.ACCESS] * 2]


def test_report_says_what_was_not_watched(tmp_path):
    with Recorder(tmp_path / "t.ctrace", header={}):
        text = "PyTorch is not watched: there is no compiler"
        hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.PYTORCH_NOT_WATCHED)
    gaps = check(read(tmp_path / "t.ctrace")).gaps
    assert Gap(GapKind.UNSEEN, 1, (text,), codes=("pytorch-not-watched",)) in gaps
