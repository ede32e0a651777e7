"""What CUPTI's log becomes in a trace. The log is made here: only a GPU's driver writes one (tests/gpu/test_gpu_cupti.py)."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import random
import re
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
from cuda.bindings import driver
from cupti_logs import Log, judging_launches, put_code, put_launch

from cudatool.collect import cupti, cupti_log
from cudatool.collect.cupti import CuptiCollector, CuptiUnavailable
from cudatool.collect.cupti_calls import CALLS, CALLS_OF_CODE, KERNEL_ERRORS, public_name
from cudatool.collect.cupti_graphs import GpuGraphs
from cudatool.collect.cupti_rows import HOW, What
from cudatool.overview.ledger import owner_of
from cudatool.trace import hooks, stacks
from cudatool.trace.events import RECORD, AccessFlag, CopyFlag, Event, Kind, StreamFlag, UseFlag, WarningFlag
from cudatool.trace.frames import call_site
from cudatool.trace.model import Frame
from cudatool.trace.validate import MAX_ADDRESS

_HERE = threading.get_native_id()


@pytest.fixture
def collected(monkeypatch):
    """A collector over a log, whose own reading thread stands still, and the events that it passed on."""
    log, events = Log(), []
    pytorch = SimpleNamespace(is_watched=False)
    monkeypatch.setattr(cupti, "_cupti", log)
    monkeypatch.setattr(cupti, "_PERIOD", 3600)
    monkeypatch.setattr(cupti, "find_library", lambda: "libcupti.so.13")
    for device in range(2):
        hooks.close_stream(device, 0xABC)  # the tests' own
    gc.collect()  # so that no finalizer of another test's objects emits
    collector = CuptiCollector(lambda: pytorch.is_watched)
    hooks.subscribe(events.append)
    events.clear()  # streams that were known
    yield SimpleNamespace(log=log, events=events, collector=collector, pytorch=pytorch)
    hooks.unsubscribe(events.append)
    collector.stop()


def kinds(events):
    return [event.kind for event in events]


def test_memory_has_its_stack_and_the_library_that_took_it(collected):
    log = collected.log
    stack = log.call("/opt/nvidia/libcublas.so.13", ("/home/me/train.py", 7))
    log.put("cuMemAlloc_v2", 0x7000, 4096, time=5, stack=stack)
    log.put("cuMemFree_v2", 0x7000, time=9)
    collected.collector.flush()
    born, gone = collected.events
    assert (born.kind, born.time, born.address, born.size, born.name) == (
        Kind.MEM_ALLOC,
        5,
        0x7000,
        4096,
        "cuMemAlloc_v2",
    )
    assert [(frame.file, frame.line) for frame in stacks.frames(born.stack)] == [
        ("/opt/nvidia/libcublas.so.13", 0),
        ("/home/me/train.py", 7),
    ]
    assert (gone.kind, gone.size) == (Kind.MEM_FREE, 4096)
    assert born.thread == hooks.thread_id()


def test_memory_is_given_back_on_its_own_device_whichever_is_current(collected):
    log = collected.log
    lived = Event(0, Kind.MEM_ALLOC, 1, 0, 0, 0, 0, 0, "", 0xB000, 4096, 0, 0)
    collected.collector.note_living([lived])
    log.put("cuMemAlloc_v2", 0x7000, 4096, device=1)
    log.put("cuArrayCreate_v2", 0x8000, len(log.blob), device=1)
    log.blob += struct.pack("QQII", 16, 1, 0x20, 1)
    log.put("cuMemFree_v2", 0x7000, device=0)
    log.put("cuArrayDestroy", 0x8000, device=0)
    log.put("cuMemFree_v2", 0xB000, device=0)
    collected.collector.flush()
    assert [1, 1, 1] == [event.device for event in collected.events if event.kind is Kind.MEM_FREE]


@pytest.mark.parametrize("watched", [False, True])
def test_memory_that_other_processes_can_use_is_named_whoever_shares_it(collected, watched):
    """PyTorch's, too: what its source reports says nothing of handles."""
    collected.pytorch.is_watched = watched
    log = collected.log
    log.put("cuMemAlloc_v2", 0x7000, 4096)
    log.put("cuIpcGetMemHandle", 0, 0x7000)
    log.put("cuIpcOpenMemHandle_v2", 0x9000)
    log.put("cuMemExportToShareableHandle", 0, 77)
    log.put("cuMemPoolImportPointer", 0xA000)
    log.put("cuIpcOpenMemHandle_v2", 0, result=201)  # refused
    collected.collector.flush()
    shared = [one for one in collected.events if one.kind is Kind.WARNING]
    assert all(one.flags == WarningFlag.SHARED for one in shared)
    assert [
        ("cuIpcGetMemHandle", 0x7000, 4096),
        ("cuIpcOpenMemHandle", 0x9000, 0),
        ("cuMemExportToShareableHandle", 0, 0),
        ("cuMemPoolImportPointer", 0xA000, 0),
    ] == [(one.name, one.address, one.size) for one in shared]


def test_memory_that_is_mapped_counts_once(collected):
    log = collected.log
    log.put("cuMemMap", 0x1000, 64, 0, 77)
    log.put("cuMemMap", 0x9000, 64, 0, 77)  # a second place of the same memory
    log.put("cuMemUnmap", 0x1000, 64)
    collected.collector.flush()
    assert kinds(collected.events) == [Kind.MEM_ALLOC, Kind.MEM_MAP, Kind.MEM_FREE]
    assert collected.events[1].aux0 == 0x1000


def test_a_kernel_ran_on_the_stream_that_cupti_numbers(collected):
    log = collected.log
    log.names.append(b"_Z5saxpyIfEvPT_")
    log.put("cuStreamCreateWithPriority", 0xABC, 1, 2**32 - 5, 0, 0, 0, 0, 13)  # CUPTI calls it 13
    log.put(What.KERNEL, 100, 250, 13, 1, 4, 128, 0, 0, time=100, thread=0)
    collected.collector.flush()
    created, launch, ran = collected.events
    assert (created.kind, created.flags, created.address) == (Kind.STREAM_CREATE, StreamFlag.NON_BLOCKING, 0xABC)
    assert created.aux0 == -5 & 2**64 - 1
    assert (launch.kind, launch.name, launch.time, launch.stream) == (
        Kind.KERNEL_LAUNCH,
        "saxpy<float>",
        100,
        created.stream,
    )
    assert (ran.kind, ran.aux0, ran.aux1, ran.correlation) == (Kind.EXECUTION, 100, 250, launch.correlation)


def test_a_copy_and_its_execution_have_one_correlation(collected):
    log = collected.log
    log.put("cuMemAlloc_v2", 0x7000, 4096)
    log.put("cuMemcpyAsync", 0x7000, 0x5000, 64, 0, correlation=3)  # to the device, by its addresses
    log.put(What.COPY, 10, 20, 7, 64, correlation=3, thread=0)
    collected.collector.flush()
    copy, ran = [event for event in collected.events if event.kind in (Kind.MEMCPY, Kind.EXECUTION)]
    assert copy.flags == CopyFlag.DESTINATION_DEVICE | CopyFlag.ASYNC
    assert copy.correlation == ran.correlation


def test_kernels_of_a_graph_belong_to_its_launch(collected):
    log = collected.log
    log.names.append(b"step")
    log.put("cuStreamCreateWithPriority", 0xABC, 1, 0, 0, 0, 0, 0, 13)  # CUPTI calls it 13
    log.put("cuStreamBeginCapture_v2", 0xABC, 0)
    log.put("cuMemsetD8Async", 0x7000, 0, 64, 0xABC, correlation=2)  # becomes a node
    log.put("cuStreamEndCapture", 0xABC, 0xF00)
    log.put("cuGraphLaunch", 0xE0, 0xABC, correlation=4)
    log.put(What.KERNEL, 1, 2, 13, 1, 1, 1, 0, 6, correlation=4, thread=0)
    collected.collector.flush()
    assert Kind.MEMSET not in kinds(collected.events) and Kind.KERNEL_LAUNCH not in kinds(collected.events)
    launch, ran = collected.events[-2:]
    assert (launch.kind, ran.kind, ran.flags, ran.correlation) == (
        Kind.GRAPH_LAUNCH,
        Kind.EXECUTION,
        1,
        launch.correlation,
    )


def test_calls_of_our_runtime_are_told_by_it_alone(collected):
    log = collected.log
    package = os.path.dirname(os.path.dirname(cupti.__file__))
    of_user = ("/home/me/train.py", 3)
    ours = log.call("/site-packages/cuda/bindings/cydriver.so", (f"{package}/runtime/stream.py", 9), of_user)
    theirs = log.call("/site-packages/cuda/bindings/cydriver.so", of_user)
    below_us = log.call("/opt/nvidia/libcublas.so.13", (f"{package}/blas/mm.py", 9), of_user)
    for stack in (ours, theirs, below_us):
        log.put("cuMemAlloc_v2", 0x1000 * stack, 16, stack=stack)
    collected.collector.flush()
    assert [event.address for event in collected.events] == [0x1000 * theirs, 0x1000 * below_us]


def test_calls_of_the_programs_functions_that_our_runtime_calls_are_its_own(collected):
    log = collected.log
    package = os.path.dirname(os.path.dirname(cupti.__file__))
    called_back = log.call(
        "/site-packages/cuda/bindings/cydriver.so",
        ("/home/me/allocator.py", 5),
        (f"{package}/memory/pluggable.py", 9),
        (f"{package}/runtime/allocator.py", 9),
        ("/home/me/train.py", 3),
        (f"{package}/workload.py", 80),
    )
    log.put("cuMemAlloc_v2", 0x7000, 16, stack=called_back)
    collected.collector.flush()
    assert not collected.events


@pytest.mark.parametrize(
    "runs_it",
    [
        "workload.py",  # a command runs the program
        "collect/hand_overs.py",  # each thread's work, while threads are watched
        "notebook.py",
        "amp/_autocast.py",  # a decorator
        "optim/sgd.py",  # a function that the program gave
        "runtime/annotate.py",
    ],
)
def test_what_the_program_calls_is_told_whoever_of_ours_runs_it(collected, runs_it):
    log = collected.log
    package = os.path.dirname(os.path.dirname(cupti.__file__))
    for library in ("/site-packages/cuda/bindings/cydriver.so", "/site-packages/cupy/cuda/memory.so"):
        stack = log.call(library, ("/home/me/train.py", 3), (f"{package}/{runs_it}", 80), ("/home/me/train.py", 9))
        log.put("cuMemAlloc_v2", 0x1000 * stack, 16, stack=stack)
        log.put("cuStreamSynchronize", 0, stack=stack)
    collected.collector.flush()
    told = [event.kind for event in collected.events if event.kind is not Kind.STREAM_CREATE]
    assert told == [Kind.MEM_ALLOC, Kind.STREAM_SYNCHRONIZE] * 2


def test_the_rooms_of_ours_that_call_the_driver_are_known():
    package = Path(cupti.__file__).parent.parent
    elsewhere = ("sim/", "collect/", "triton_driver.py")  # for the software device alone
    for file in package.rglob("*.py"):
        path = file.relative_to(package).as_posix()
        if not path.startswith(elsewhere) and re.search(r"\bdriver\.cu[A-Z]\w+\(", file.read_text()):
            assert cupti_log._is_of_our_runtime([Frame(str(file), "", 1)]), path


def test_a_stream_made_before_the_recording_is_not_the_default_one(collected):
    log = collected.log
    log.names.append(b"step")
    log.put(What.CONTEXT, 7)  # the legacy default stream
    log.put(What.KERNEL, 1, 2, 7, 1, 1, 1, 0, 0, thread=0)
    log.put(What.KERNEL, 1, 2, 99, 1, 1, 1, 0, 0, thread=0)
    collected.collector.flush()
    first, second = [event.stream for event in collected.events if event.kind == Kind.KERNEL_LAUNCH]
    assert first == hooks.stream_id(0, 0) != second
    hooks.close_stream(0, (1 << 56) + 99)


def test_beside_pytorch_only_the_memory_of_other_libraries_is_told_and_in_order(collected):
    log = collected.log
    collected.pytorch.is_watched = True
    cache = log.call("/site-packages/torch/lib/libc10_cuda.so", ("/home/me/train.py", 3))
    cublas = log.call("/opt/nvidia/libcublas.so.13", ("/home/me/train.py", 4))
    log.put("cuMemAlloc_v2", 0x1000, 16, time=1, stack=cache)
    log.put("cuEventRecord", 0x8, 0, time=2)
    log.put("cuMemAlloc_v2", 0x2000, 16, time=3, stack=cublas)
    log.put("cuMemAlloc_v2", 0x3000, 16, time=7, stack=cublas)
    log.put(What.KERNEL, 1, 2, 7, 0, 1, 1, 0, 0, thread=0)
    hooks.forward(hooks.own_event(Kind.MARK, name="PyTorch's")._replace(time=5))
    collected.collector.flush()
    assert [(event.kind, event.time) for event in collected.events] == [
        (Kind.MEM_ALLOC, 3),
        (Kind.MARK, 5),
        (Kind.MEM_ALLOC, 7),
    ]


def enqueue(name, stream):
    correlation = hooks.begin()
    hooks.end()
    return correlation, lambda: hooks.emit(Kind.KERNEL_LAUNCH, correlation=correlation, stream=stream, name=name)


def ran_before_its_report(log):
    """A kernel of our runtime has run from 100 to 250 ns: return the launch's number, and what reports the launch."""
    log.names.append(b"ours")
    correlation, report = enqueue("ours", 5)
    log.put(What.OPERATION, correlation, correlation=3)
    log.put(What.KERNEL, 100, 250, 13, 1, 4, 128, 0, 0, time=100, correlation=3, thread=0)
    return correlation, report


def test_when_the_kernels_of_our_runtime_ran_is_told_with_its_launch(collected):
    correlation, report = ran_before_its_report(collected.log)
    log = collected.log
    log.put(What.KERNEL, 250, 260, 13, 1, 4, 128, 0, 0, time=250, correlation=3, thread=0)  # a product is two kernels
    report()
    log.put(What.KERNEL, 300, 350, 13, 1, 4, 128, 0, 0, time=300, correlation=9, thread=0)  # of another library
    collected.collector.flush()
    assert kinds(collected.events) == [Kind.KERNEL_LAUNCH, Kind.EXECUTION, Kind.EXECUTION]
    assert [(ran.correlation, ran.stream, ran.aux0, ran.aux1) for ran in collected.events[1:]] == [
        (correlation, 5, 100, 250),
        (correlation, 5, 250, 260),
    ]


def test_a_kernel_that_ran_before_our_runtime_reports_its_launch_waits_for_that(collected):
    _, report = ran_before_its_report(collected.log)
    collected.collector.flush()
    assert not collected.events
    report()
    collected.collector.flush()
    collected.collector.flush()
    assert kinds(collected.events) == [Kind.KERNEL_LAUNCH, Kind.EXECUTION]


def test_a_kernel_of_an_operation_that_failed_is_not_told(collected):
    _, report = ran_before_its_report(collected.log)
    collected.collector.flush()
    collected.collector.flush()
    report()
    collected.collector.flush()
    assert kinds(collected.events) == [Kind.KERNEL_LAUNCH]


def test_once_our_runtime_works_kernels_are_told_by_it_alone(collected):
    log = collected.log
    log.names.append(b"step")
    log.put(What.KERNEL, 1, 2, 7, 1, 1, 1, 0, 0, thread=0)
    collected.collector.flush()
    assert Kind.KERNEL_LAUNCH in kinds(collected.events)
    hooks.forward(hooks.own_event(Kind.KERNEL_LAUNCH, name="ours"))
    collected.events.clear()
    log.put(What.KERNEL, 3, 4, 7, 1, 1, 1, 0, 0, thread=0)
    collected.collector.flush()
    assert collected.events == []


def test_a_forked_child_waits_for_no_lock_of_the_reader(collected):
    """The thread that reads the log may hold its lock at the moment of the fork; the child has no such thread."""
    held, done = threading.Event(), threading.Event()

    def reads():
        with collected.collector._lock:
            held.set()
            done.wait(60)

    reader = threading.Thread(target=reads)
    reader.start()
    assert held.wait(60)

    def in_the_child():
        hooks.emit(Kind.MARK, name="in the child")
        return 7

    status = forked.status_of(in_the_child)
    done.set()
    reader.join()
    assert status == 7


def test_lost_records_are_said(collected):
    collected.log.lost = 12
    collected.collector.flush()
    (warning,) = collected.events
    assert warning.kind == Kind.WARNING and "12 records of CUPTI were lost" in warning.name


def test_a_call_that_failed_is_no_event_and_a_question_is(collected):
    collected.log.put("cuMemAlloc_v2", 0, 1 << 60, result=2)
    collected.log.put("cuEventQuery", 0x8, result=600)
    collected.collector.flush()
    (asked,) = collected.events
    assert (asked.kind, asked.aux1) == (Kind.EVENT_QUERY, 0)


def test_without_permission_for_activity_calls_are_recorded_and_the_reason_is_known(monkeypatch):
    log = Log()
    log.error = "insufficient privileges"
    monkeypatch.setattr(cupti, "_cupti", log)
    monkeypatch.setattr(cupti, "find_library", lambda: "libcupti.so.13")
    collector = CuptiCollector(lambda: False)
    try:
        assert collector.activity_error == "insufficient privileges"
    finally:
        collector.stop()


@pytest.mark.parametrize(("level", "has_events"), [("memory", False), ("kernels", True), ("launches", True)])
def test_calls_that_libraries_make_beside_each_launch_are_logged_only_where_they_are_needed(
    monkeypatch, level, has_events
):
    """JAX calls cuKernelGetFunction, cuEventRecord and cuStreamWaitEvent ten times a step."""
    log = Log()
    monkeypatch.setattr(cupti, "_cupti", log)
    monkeypatch.setattr(cupti, "find_library", lambda: "libcupti.so.13")
    CuptiCollector(lambda: False, cupti.Level(level)).stop()
    of_events = {name for name in log.numbers if "Event" in name}
    assert bool(of_events) == has_events
    assert not {"cuKernelGetFunction", "cuLibraryGetModule"} & set(log.numbers)
    assert {"cuMemAlloc_v2", "cuStreamCreate", "cuStreamSynchronize", "cuGraphLaunch"} <= set(log.numbers)
    with judging_launches(monkeypatch) as judged:
        wanted = {"cuKernelGetFunction", "cuLibraryGetModule", "cuEventRecord", "cuStreamWaitEvent"}
        assert wanted <= set(judged.log.numbers)


def test_no_libcupti_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(cupti, "loaded", lambda library: None)
    monkeypatch.setattr(cupti, "_can_load", lambda library: False)
    with pytest.raises(CuptiUnavailable, match="pip install nvidia-cuda-cupti"):
        cupti.find_library()


def test_the_extension_opens_no_file_that_is_not_cupti(tmp_path):
    from cudatool.collect import _cupti

    wrong = tmp_path / "libcupti.so.13"
    wrong.write_bytes(b"no library")
    with pytest.raises(OSError, match=r"invalid ELF header|file too short"):
        _cupti.open(str(wrong))
    with pytest.raises(OSError, match="has no function"):
        _cupti.open("libm.so.6")
    with pytest.raises(RuntimeError, match="no libcupti is open"):
        _cupti.start({}, 1)
    assert _cupti.drain() is None


def told(collected, rows):
    """Return what subscribers get of rows: (call or What, words, and what else :meth:`Log.put` takes)."""
    collected.events.clear()
    for what, words, rest in rows:
        collected.log.put(what, *words, **rest)
    collected.collector.flush()
    return list(collected.events)


@pytest.mark.some_of("seed", range(20), 6)
def test_what_c_tells_by_itself_is_what_its_reader_tells(collected, seed, monkeypatch):
    draw = random.Random(seed)
    streams, events, blocks = [0, 1, 2, 0xA00, 0xB08], [0x100, 0x208, 0x310], [0x7000, 0x8000, 0x9000]
    stacks_known = [
        0,
        collected.log.call("/x/libcublas.so", ("/home/p.py", 3)),
        collected.log.call("/x/libtorch.so", ("/home/p.py", 9)),
        collected.log.call("/x/libtorch.so", ("/home/p.py", 9), module="Net.fc1"),
        collected.log.call("/x/libtorch.so", ("/home/p.py", 9), module="Net.fc2"),
    ]

    def one():
        words = {
            "cuEventRecord": (draw.choice(events), draw.choice(streams)),
            "cuEventRecordWithFlags_ptsz": (draw.choice(events), draw.choice(streams), draw.randrange(2)),
            "cuStreamWaitEvent": (draw.choice(streams), draw.choice(events), draw.randrange(2)),
            "cuStreamSynchronize_ptsz": (draw.choice(streams),),
            "cuStreamQuery": (draw.choice(streams),),
            "cuEventQuery": (draw.choice(events),),
            "cuEventSynchronize": (draw.choice(events),),
            "cuEventDestroy_v2": (draw.choice(events),),
            "cuCtxSynchronize": (),
            "cuMemcpyHtoDAsync_v2": (0x5000, 0x10, draw.randrange(99), draw.choice(streams)),
            "cuMemcpyDtoDAsync_v2_ptsz": (0x5000, 0x6000, draw.randrange(99), draw.choice(streams)),
            "cuGraphLaunch": (0x77, draw.choice(streams)),
            "cuMemcpyAsync": (0x5000, 0x6000, 8, draw.choice(streams)),
            "cuMemsetD16Async": (0x5000, 7, draw.randrange(99), draw.choice(streams)),
            "cuStreamDestroy_v2": (0xB08,),
            "cuStreamBeginCapture_v2": (0xA00, 0),
            "cuStreamEndCapture": (0xA00, 0x77),
            What.BLOCK: (
                draw.randrange(9),
                draw.choice(blocks),
                draw.randrange(5000),
                0xA00,
                not draw.randrange(9),
                1,
                2,
            ),
        }
        what = draw.choice(list(words))
        rest = {"stack": draw.choice(stacks_known), "result": 600 * draw.randrange(2) if "Query" in str(what) else 0}
        return what, words[what], {"thread": draw.choice([tests_thread, 4711]), **rest}

    def many():
        """Rows of one thread and one stream, which C makes without the interpreter's lock, as long as it can."""
        thread, action = draw.choice([tests_thread, 4711]), draw.randrange(8, 10)
        for _ in range(80):
            block = draw.randrange(action), draw.choice(blocks), draw.randrange(5000), 0xA00, 0, 1, 2
            copy = 0x5000, 0x10, draw.randrange(99), 0xA00
            what, words = (What.BLOCK, block) if draw.randrange(9) else ("cuMemcpyHtoDAsync_v2", copy)
            yield what, words, {"thread": thread, "stack": draw.choice(stacks_known)}

    tests_thread = threading.get_native_id()
    drawn = [*many(), *(one() for _ in range(150)), *many(), *(one() for _ in range(150))]
    rows = [(what, words, {**rest, "time": time}) for time, (what, words, rest) in enumerate(drawn)]

    def as_at_first():
        calls = collected.collector._calls
        calls._graphs = calls.memory._graphs = GpuGraphs()
        calls.memory.of_graphs.clear()
        for handle in (2748, *streams[3:]):
            hooks.close_stream(0, handle)
        for handle in events:
            hooks.close_event(handle)

    as_at_first()
    by_c = told(collected, rows)
    as_at_first()
    nothing = np.zeros(len(collected.collector._calls._how), HOW)  # each row by its reader
    nothing["asks"] = collected.collector._calls._how["asks"]
    monkeypatch.setattr(collected.collector._calls, "_how", nothing)
    by_reader = told(collected, rows)
    assert len(by_c) > 100

    def what(kind):
        return "event" if "EVENT" in kind.name else "graph" if kind is Kind.GRAPH_CAPTURE_END else ""

    def plain(told):  # ids are new each time
        ids = {}
        return [
            event._replace(
                stream=ids.setdefault(("s", event.stream), len(ids)),
                correlation=ids.setdefault(("c", event.correlation), len(ids)),
                aux0=ids.setdefault((numbered, event.aux0), len(ids)) if (numbered := what(event.kind)) else event.aux0,
            )
            for event in told
            if event.kind is not Kind.STREAM_CREATE
        ]

    assert plain(by_c) == plain(by_reader)


def test_blocks_of_pytorch_are_told_and_those_of_graphs_are_not(collected):
    log = collected.log
    where = log.call("/x/libtorch.so", ("/home/p.py", 3))
    for action, address, captured in ((3, 0x7000, 0), (0, 0x7000, 0), (0, 0x8000, 1), (1, 0x7000, 0), (2, 0x7000, 0)):
        log.put(What.BLOCK, action, address, 1000, 0xABC, captured, 0, 0, stack=where)
    log.put(What.BLOCK, 1, 0x8000, 1000, 0xABC, 0, 0, 0)  # the graph's
    log.put(What.BLOCK, 8, 1 << 20, 5000, 0xABC, 0, 0, 0, stack=where)
    collected.collector.flush()
    found = [event for event in collected.events if event.kind is not Kind.STREAM_CREATE]
    assert [event.kind for event in found] == [
        *(Kind.SEGMENT_ALLOC, Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED, Kind.OOM)
    ]
    assert [(event.address, event.size, event.aux0) for event in found[:2]] == [(0x7000, 1000, 0), (0x7000, 1024, 1000)]
    assert (found[4].size, found[4].aux0) == (5120, 1 << 20)
    assert stacks.frames(found[1].stack)[1].line == 3


def test_blocks_of_equal_layers_have_one_stack_and_the_paths_of_their_modules(collected):
    log = collected.log
    for address, module in ((0x7000, "Net.layers.0"), (0x8000, "Net.layers.1"), (0x9000, "")):
        where = log.call("/x/libtorch.so", ("/home/p.py", 3), module=module)
        log.put(What.BLOCK, 0, address, 512, 0xABC, 0, 0, 0, stack=where)
        log.put(What.BLOCK, 1, address, 512, 0xABC, 0, 0, 0, stack=where)
    collected.collector.flush()
    made = [event for event in collected.events if event.kind is Kind.BLOCK_ALLOC]
    assert [event.name for event in made] == ["Net.layers.0", "Net.layers.1", ""]
    assert len({event.stack for event in made}) == 1
    assert {event.name for event in collected.events if event.kind is Kind.BLOCK_FREE_REQUESTED} == {""}


def test_ranges_of_a_known_thread_take_no_python_and_are_as_pythons(collected, monkeypatch):
    log, calls = collected.log, collected.collector._calls
    given = [
        (Kind.RANGE_PUSH, "XlaModule:é".encode(), 0),
        (Kind.RANGE_START, b"step \xff", 7),
        (Kind.RANGE_END, b"", 7),
    ]
    given += [(Kind.RANGE_PUSH, b"twice", 0), (Kind.RANGE_PUSH, b"twice", 0), *[(Kind.RANGE_POP, b"", 0)] * 3]
    texts = [f"{number % 90}: op ".encode() * (number % 7) for number in range(600)]  # more than C keeps
    given += [(Kind.MARK, text, 0) for text in texts]

    def reported():
        for time, (kind, text, number) in enumerate(given, start=1):
            log.put(What.RANGE, kind, len(log.blob), len(text), number, time=time)
            log.blob += text
        collected.events.clear()
        collected.collector.flush()
        return [event for event in collected.events if event.kind in (Kind.MARK, *(kind for kind, _, _ in given))]

    monkeypatch.setattr(calls, "_how", calls._nothing_by_itself)
    by_python = reported()
    monkeypatch.undo()
    monkeypatch.setitem(calls._readers, What.RANGE, None)
    assert by_python == reported()
    names = ["XlaModule:é", "step \ufffd", "", "twice", "twice", "", "", "", *(text.decode() for text in texts)]
    assert [(event.name, event.device, event.aux0) for event in by_python] == [
        (name, -1, number) for name, (_, _, number) in zip(names, given, strict=True)
    ]


def test_modules_keep_their_names_after_many_numbered_ranges(collected):
    log = collected.log
    where = log.call("/x/libtorch.so", ("/home/p.py", 3), module="Net.fc1")
    for number in range(5000):
        text = f"step {number}".encode()
        log.put(What.RANGE, Kind.RANGE_PUSH, len(log.blob), len(text), 0)
        log.blob += text
    for _ in range(2):
        log.put(What.BLOCK, 0, 0x7000, 512, 0xABC, 0, 0, 0, stack=where)
        collected.collector.flush()
    assert [event.name for event in collected.events if event.kind is Kind.BLOCK_ALLOC] == ["Net.fc1"] * 2


def test_a_module_in_a_folder_of_packages_has_its_own_name(collected, tmp_path, monkeypatch):
    (tmp_path / "cupy-1.dist-info").mkdir()
    (tmp_path / "cupy-1.dist-info" / "RECORD").write_text("cupy/cuda/memory.cpython-311-x86_64-linux-gnu.so,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    library = f"{tmp_path}/cupy/cuda/memory.cpython-311-x86_64-linux-gnu.so"
    stack = collected.log.call(library, ("/home/me/train.py", 7))
    collected.log.put("cuMemAlloc_v2", 0x7000, 4096, time=5, stack=stack)
    collected.collector.flush()
    found = stacks.frames(collected.events[0].stack)
    assert ("CuPy", "train.py:7 (function) by cupy.cuda.memory") == (owner_of(found), call_site(found))


def test_pinned_memory_that_pytorch_takes_is_pytorchs(collected, tmp_path):
    stacks.hide(str(tmp_path / "torch"))
    library, inside = f"{tmp_path}/torch/lib/libtorch_cuda.so", f"{tmp_path}/torch/utils/data/_utils/pin_memory.py"
    stack = collected.log.call(library, (inside, 98), ("/home/me/train.py", 7))
    collected.log.put("cuMemHostAlloc", 0x7000, 4096, time=5, stack=stack)
    collected.collector.flush()
    (event,) = collected.events
    found = stacks.frames(event.stack)
    assert ("PyTorch", "train.py:7 (function) by libtorch_cuda.so") == (owner_of(found), call_site(found))


def _block(log, address, time, device=0):
    log.put(What.BLOCK, 0, address, 512, 0xABC, 0, 0, 0, time=time, device=device)


def _snapshot(log, time, device=0):
    log.put(What.BLOCK, 7, time=time, device=device)


def _blocks(events):
    return [event.address for event in events if event.kind is Kind.BLOCK_ALLOC]


def test_who_listens_after_a_snapshot_of_pytorch_gets_what_happened_after_it(collected):
    log, late = collected.log, []
    with collected.collector.paused():
        _block(log, 0x1000, 1)
        _snapshot(log, 2)
        _block(log, 0x2000, 3)
        assert collected.collector.pass_on_snapshot()
        hooks.stream_id(0, 0x5EED)  # an event of the thread that has paused: it must not pass on what came before it
        hooks.subscribe(late.append)
    try:
        collected.collector.flush()
    finally:
        hooks.unsubscribe(late.append)
        hooks.close_stream(0, 0x5EED)
    assert [0x1000, 0x2000] == _blocks(collected.events)
    assert [0x2000] == _blocks(late)


@pytest.mark.parametrize(
    ("device", "time", "is_whole"), [(1, 3, True), (0, 3, False), (0, 1, True), (1, 6, True), (0, 6, True)]
)
def test_a_change_between_the_snapshots_of_two_devices_is_noticed(collected, device, time, is_whole):
    log = collected.log
    rows = [(2, None, 0), (5, None, 1), (time, 0x1000, device)]
    with collected.collector.paused():
        for when, address, of in sorted(rows, key=lambda row: row[0]):
            _snapshot(log, when, of) if address is None else _block(log, address, when, of)
        assert is_whole == collected.collector.pass_on_snapshot()


def test_without_a_note_of_the_snapshot_nothing_says_which_blocks_it_has(collected):
    with collected.collector.paused():
        _block(collected.log, 0x1000, 1)
        assert not collected.collector.pass_on_snapshot()


@pytest.mark.parametrize(
    ("kind", "call", "release"),
    [(Kind.MEM_ALLOC, "cuMemFree_v2", Kind.MEM_FREE), (Kind.HOST_ALLOC, "cuMemFreeHost", Kind.HOST_FREE)],
)
def test_memory_from_before_has_a_release(collected, kind, call, release):
    lived = Event(0, kind, 0, 0, 0, 0, 0, 0, "", 0x7000, 4096, 0, 0)
    collected.collector.note_living([lived])
    collected.log.put(call, 0x7000)
    collected.collector.flush()
    (free,) = (event for event in collected.events if event.kind is release)
    assert (0x7000, 4096) == (free.address, free.size)


def test_blocks_are_the_programs_though_a_function_of_ours_called_pytorchs(collected):
    ours = os.path.join(os.path.dirname(cupti.__file__), "torch_blocks.py")
    where = collected.log.call("/x/libtorch.so", (ours, 90), ("/home/p.py", 3))
    nowhere = collected.log.call("", (ours, 90), ("/home/p.py", 3))
    for stack in (where, nowhere):
        collected.log.put(What.BLOCK, 0, 0x7000, 1000, 0xABC, 0, 0, 0, stack=stack)
    collected.collector.flush()
    assert kinds(collected.events).count(Kind.BLOCK_ALLOC) == 2


def test_use_of_the_card_is_told_beside_any_source(collected):
    collected.pytorch.is_watched = True
    collected.log.put(What.USE, 500 << 20, 600 << 20, 80 << 30, 3)
    collected.collector.flush()
    (event,) = collected.events
    assert (event.kind, event.size, event.address) == (Kind.DEVICE_USE, 500 << 20, 600 << 20)
    assert (event.aux0, event.flags) == (80 << 30, UseFlag.CONTEXT | UseFlag.MODULE)


def test_a_graph_ran_as_a_whole(collected):
    collected.log.put("cuGraphLaunch", 0x55, 0xABC, correlation=7)
    collected.log.put(What.GRAPH, 100, 400, 3, correlation=7)
    collected.collector.flush()
    launch, ran = (event for event in collected.events if event.kind in (Kind.GRAPH_LAUNCH, Kind.EXECUTION))
    assert (ran.correlation, ran.stream, ran.aux0, ran.aux1) == (launch.correlation, launch.stream, 100, 400)
    assert (ran.name, ran.flags) == ("graph", 0)


@pytest.fixture
def launching(monkeypatch):
    with judging_launches(monkeypatch) as found:
        yield found


def test_a_launch_has_its_stream_its_name_and_what_it_may_touch(launching):
    log = launching.log
    log.put("cuMemAlloc_v2", 0x7F0000000000, 4096, time=5)
    put_code(log)
    put_launch(log)
    put_launch(log, function=0x99)  # code that was loaded before
    launching.collector.flush()
    launches = [event for event in launching.events if event.kind == Kind.KERNEL_LAUNCH]
    assert [("fill", 64, 4 | 1 << 32 | 1 << 48)] * 2 == [(one.name, one.size, one.aux0) for one in launches]
    (access,) = [event for event in launching.events if event.kind == Kind.ACCESS]
    assert (access.correlation, access.address, access.size) == (launches[0].correlation, 0x7F0000000000, 4096)
    assert access.flags == AccessFlag.WRITE | AccessFlag.INEXACT
    assert access.stream == launches[0].stream != 0


def test_a_call_whose_bytes_no_event_describes_is_said_once(launching):
    for _ in range(3):
        launching.log.put("cuMemPrefetchAsync_v2")
    launching.collector.flush()
    (warning,) = [event for event in launching.events if event.kind == Kind.WARNING]
    assert warning.name == "cuMemPrefetchAsync is not recorded on a GPU" and warning.flags == WarningFlag.UNSEEN


@pytest.mark.parametrize("runtime_works", [False, True])
def test_a_kernel_that_failed_is_told_with_the_call_that_said_so(launching, runtime_works):
    log = launching.log
    if runtime_works:
        hooks.emit(Kind.KERNEL_LAUNCH, correlation=hooks.new_correlation())
        launching.events.clear()
    package = os.path.dirname(os.path.dirname(cupti.__file__))
    of_us = log.call("/site-packages/cuda/bindings/cydriver.so", (f"{package}/runtime/device.py", 9), ("/me/run.py", 3))
    log.put(What.FAILURE, 719, log.numbers["cuStreamSynchronize_ptsz"], stack=of_us)
    launching.collector.flush()
    warning, finding = launching.events[-2:]
    assert (warning.kind, warning.flags) == (Kind.WARNING, WarningFlag.UNSEEN)
    assert warning.name == "work after CUDA_ERROR_LAUNCH_FAILED"
    assert finding.kind == Kind.FINDING and json.loads(finding.name) == {
        "check": "memcheck",
        "kind": "kernel-error",
        "text": "cuStreamSynchronize returned CUDA_ERROR_LAUNCH_FAILED",
    }
    assert [frame.file for frame in stacks.frames(finding.stack)][-1] == "/me/run.py"


def test_the_results_that_a_failed_kernel_leaves_have_the_drivers_names():
    assert KERNEL_ERRORS == {code: driver.CUresult(code).name for code in KERNEL_ERRORS}


def test_arrays_are_memory_of_their_own_though_they_have_no_address(collected):
    log = collected.log
    flat, solid = driver.CUDA_ARRAY_DESCRIPTOR(), driver.CUDA_ARRAY3D_DESCRIPTOR()
    flat.Width, flat.Height, flat.NumChannels = 100, 0, 1
    flat.Format = driver.CUarray_format.CU_AD_FORMAT_HALF
    solid.Width, solid.Height, solid.Depth, solid.NumChannels = 64, 32, 8, 4
    solid.Format = driver.CUarray_format.CU_AD_FORMAT_FLOAT
    log.blob = ctypes.string_at(flat.getPtr(), 24) + 2 * ctypes.string_at(solid.getPtr(), 40)
    log.put("cuArrayCreate_v2", 0x7A, 0)
    log.put("cuArray3DCreate_v2", 0x7B, 24)
    log.put("cuMipmappedArrayCreate", 0x7C, 64, 3)
    log.put("cuMemAlloc_v2", 0x7000, 4096)
    log.put("cuArrayDestroy", 0x7B)
    log.put("cuMipmappedArrayDestroy", 0x7C)
    log.put("cuArrayDestroy", 0x99)  # made before
    collected.collector.flush()
    sizes = [200, 64 * 32 * 8 * 16, (64 * 32 * 8 + 32 * 16 * 4 + 16 * 8 * 2) * 16]
    made, freed = collected.events[:3], collected.events[4:]
    assert [(Kind.MEM_ALLOC, size) for size in sizes] == [(event.kind, event.size) for event in made]
    assert [(event.address, event.size) for event in made[1:]] == [(event.address, event.size) for event in freed]
    assert {Kind.MEM_FREE} == {event.kind for event in freed}
    ends = [(event.address, event.address + event.size) for event in made]
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(ends))
    assert 1 << 57 < ends[0][0] and ends[-1][1] < MAX_ADDRESS


_NO_WORK = re.compile(
    "cuEGL|cuStream(Get|IsCapturing|SetAttribute|CopyAttributes|UpdateCaptureDependencies|(Begin|End)(Recapture|CaptureToCig))"
    "|cuCtxGetStreamPriorityRange|cuThreadExchangeStreamCaptureMode"
)


def test_each_function_of_the_driver_that_works_on_a_stream_is_recorded_or_said_not_to_be():
    known = {public_name(name) for name in (*CALLS, *CALLS_OF_CODE)}
    functions = (getattr(driver, name) for name in dir(driver) if re.match("cu[A-Z]", name))
    takes_stream = re.compile(r"\A(cu(Memcpy|Memset|Launch)|.*[sS]tream)")
    work = {one.__name__ for one in functions if takes_stream.match((one.__doc__ or "").partition("\n")[0])}
    assert len(work) > 90
    assert set() == {name for name in work if public_name(name) not in known and not _NO_WORK.match(name)}


@pytest.mark.parametrize(
    ("call", "words"), [("cuStreamCreate", (0xABC, 1)), ("cuGreenCtxStreamCreate", (0xABC, 0, 1, 0xFFFFFFFF))]
)
def test_a_stream_that_does_not_block_does_not_wait_for_the_default_one(collected, call, words):
    collected.log.put(call, *words)
    collected.collector.flush()
    (created,) = collected.events
    assert (created.kind, created.flags) == (Kind.STREAM_CREATE, StreamFlag.NON_BLOCKING)
    assert created.aux0 == (0 if call == "cuStreamCreate" else 2**64 - 1)  # the priority


def test_a_stream_is_of_its_own_device_whichever_is_current(collected):
    log = collected.log
    log.put("cuStreamCreate", 0xABC, 1, device=1)
    log.put("cuEventRecord", 0xE0, 0xABC, device=1)
    log.put("cuStreamSynchronize", 0xABC, device=0)
    log.put("cuStreamWaitEvent", 0xABC, 0xE0, 0, device=0)
    log.put("cuStreamDestroy_v2", 0xABC, device=0)
    log.put("cuStreamCreate", 0xABC, 1, device=0)  # the driver reuses handles
    log.put("cuStreamDestroy_v2", 0xABC, device=1)
    collected.collector.flush()
    made = [event for event in collected.events if event.kind is Kind.STREAM_CREATE]
    assert [1, 0] == [event.device for event in made]
    first, second = (event.stream for event in made)
    assert [first] * 5 + [second] * 2 == [event.stream for event in collected.events if event.stream]
    assert 2 == kinds(collected.events).count(Kind.STREAM_DESTROY)


def test_launches_of_other_libraries_are_reported_beside_pytorch(launching):
    launching.pytorch.is_watched = True
    log = launching.log
    put_code(log)
    launching.pytorch.passes_on = True
    hooks.forward(Event(10, Kind.BLOCK_ALLOC, 0, 0, 0, 0, 0, 0, "", 0x7F0000000000, 512, 512, 0))
    hooks.forward(Event(11, Kind.KERNEL_LAUNCH, 0, 0, 0, 0, 77, 0, "aten::add", 0, 0, 0, 0))
    launching.pytorch.passes_on = False
    put_launch(log, pointer=0x7F0000000008)
    hooks.forward(Event(30, Kind.BLOCK_FREE_COMPLETED, 0, 0, 0, 0, 0, 0, "", 0x7F0000000000, 512, 512, 0))
    log.put("cuMemAlloc_v2", 0x7E0000000000, 4096, time=40)
    launching.collector.flush()
    assert launching.collector.watches_launches and launching.log.watched == [1]
    assert [Kind.BLOCK_ALLOC, "aten::add", "fill", Kind.ACCESS, Kind.BLOCK_FREE_COMPLETED, Kind.MEM_ALLOC] == [
        event.name if event.kind is Kind.KERNEL_LAUNCH else event.kind
        for event in launching.events
        if event.kind is not Kind.STREAM_CREATE
    ]
    (access,) = [event for event in launching.events if event.kind is Kind.ACCESS]
    assert (0x7F0000000000, 512) == (access.address, access.size), "PyTorch's block"
    launching.events.clear()
    put_launch(log, pointer=0x7F0000000008)
    launching.collector.flush()
    (doubt,) = [event.name for event in launching.events if event.kind is Kind.WARNING]
    assert "unknown address" in doubt, "the block is gone"


def of_pytorch_and_others(chance):
    """Events of PyTorch's allocator, and between them what other libraries call: launches with pointers into its blocks."""
    live, time = {}, 10
    for _ in range(60):
        time += chance.randrange(1, 4)
        kind, address = (
            chance.choice([Kind.BLOCK_ALLOC, Kind.HOST_ALLOC]),
            0x7F0000000000 + chance.randrange(6) * 0x1000,
        )
        if chance.random() < 0.3:
            yield "launch", time, address + chance.randrange(0x1000)
        elif address in live:
            gone = {Kind.BLOCK_ALLOC: Kind.BLOCK_FREE_COMPLETED, Kind.HOST_ALLOC: Kind.HOST_FREE}[live.pop(address)]
            yield "event", time, Event(time, gone, 0, 0, 0, 0, 0, 0, "", address, 512, 512, 0)
        else:
            live[address] = kind
            yield "event", time, Event(time, kind, 0, 0, 0, 0, 0, 0, "", address, chance.choice([512, 4096]), 512, 0)


@pytest.mark.parametrize("seed", range(4))
def test_events_that_come_together_are_in_the_order_of_those_that_come_one_by_one(monkeypatch, seed):
    told = []
    for most in (1, 7, 100):  # events that come together
        with judging_launches(monkeypatch) as launching:
            launching.pytorch.is_watched = True
            log = launching.log
            put_code(log)
            waiting = []
            for what, time, one in [*of_pytorch_and_others(random.Random(seed)), ("end", 0, None)]:
                if what == "launch":
                    put_launch(log, pointer=one, time=time)
                elif what == "event":
                    waiting.append(one)
                if len(waiting) == most or what == "end":
                    launching.pytorch.passes_on = True
                    if most == 1:
                        for event in waiting:
                            hooks.forward(event)
                    elif waiting:
                        rows = [(*event[:5], 0, *event[5:8], 0, *event[9:]) for event in waiting]
                        hooks.forward_rows(np.array(rows, RECORD), [""])
                    launching.pytorch.passes_on = False
                    waiting.clear()
            launching.collector.flush()
            seen = [event for event in launching.events if event.kind is not Kind.STREAM_CREATE]
            told.append([(event.kind, event.time, event.name, event.address, event.size) for event in seen])
    assert told[0] == told[1] == told[2]
    assert {Kind.ACCESS, Kind.WARNING, Kind.HOST_FREE} <= {kind for kind, *_ in told[0]}


def test_launches_are_left_to_our_runtimes_own_source_once_it_works(launching):
    launching.pytorch.is_watched = True
    hooks.forward(Event(11, Kind.KERNEL_LAUNCH, 0, 0, 0, 0, 77, 0, "ours", 0, 0, 0, 0))
    launching.log.names.append(b"fill")
    put_launch(launching.log)
    launching.log.put("cuMemAlloc_v2", 0x7F0000000000, 4096)
    launching.collector.flush()
    assert not launching.collector.watches_launches
    assert ["ours"] == [event.name for event in launching.events if event.kind in (Kind.KERNEL_LAUNCH, Kind.MEM_ALLOC)]
    assert launching.log.watched == [1, 0]


def test_at_the_level_of_launches_a_kernel_has_the_stack_of_its_call_and_the_times_of_its_run(monkeypatch):
    log, events = Log(), []
    monkeypatch.setattr(cupti, "_cupti", log)
    monkeypatch.setattr(cupti, "_PERIOD", 3600)
    monkeypatch.setattr(cupti, "find_library", lambda: "libcupti.so.13")
    collector = CuptiCollector(lambda: False, cupti.Level.LAUNCHES)
    hooks.subscribe(events.append)
    try:
        log.names.append(b"fill")
        stack = log.call("/usr/bin/python3", ("/home/me/train.py", 7))
        grid = 4 | 1 << 32 | 1 << 48
        log.put(
            What.LAUNCH, 0x20, 0, grid, grid, 64 | 4 << 32, (1 << 64) - 1, 0, 1, time=20, correlation=5, stack=stack
        )
        log.put(What.KERNEL, 1000, 2000, 7, 1, grid, grid, 64, correlation=5, time=1000)
        collector.flush()
    finally:
        hooks.unsubscribe(events.append)
        collector.stop()
    launch, ran = (event for event in events if event.kind in (Kind.KERNEL_LAUNCH, Kind.EXECUTION))
    assert (20, "fill") == (launch.time, launch.name)
    assert [("/home/me/train.py", 7)] == [(frame.file, frame.line) for frame in stacks.frames(launch.stack)]
    assert (launch.correlation, 1000, 2000) == (ran.correlation, ran.aux0, ran.aux1)
    assert log.watched == [2]


def test_records_of_another_source_come_after_what_the_log_has_up_to_their_time(collected):
    _block(collected.log, 0x7000, time=5)
    _block(collected.log, 0x8000, time=9)
    records = np.zeros(1, RECORD)
    records["kind"], records["time"], records["name"] = Kind.MODULE_TENSOR, 7, 1
    collected.collector.pass_on(records, ["", "Net.weight"])
    collected.collector.flush()
    told = [(event.kind, event.address, event.name) for event in collected.events if event.kind != Kind.STREAM_CREATE]
    assert told == [
        (Kind.BLOCK_ALLOC, 0x7000, ""),
        (Kind.MODULE_TENSOR, 0, "Net.weight"),
        (Kind.BLOCK_ALLOC, 0x8000, ""),
    ]
