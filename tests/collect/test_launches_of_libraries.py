"""What a launch on a GPU is found to access: its arguments, as CUPTI's log has them, and the PTX of its code."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cupti_logs import judging_launches, put_code, put_launch

from cudatool.collect import _cupti
from cudatool.collect.cupti_calls import CALLS, CALLS_OF_CODE
from cudatool.collect.cupti_events import CallEvents
from cudatool.collect.cupti_log import Tables
from cudatool.collect.cupti_rows import ROW, What
from cudatool.collect.cupti_work import Enqueued
from cudatool.collect.gpu_launches import Launches, LaunchRowFlag, Pointed
from cudatool.collect.live_memory import LiveMemory
from cudatool.collect.loaded_code import ImageKind, LoadedCode
from cudatool.trace.events import AccessFlag, Kind

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 to, .param .u64 from, .param .u32 n)
{
    .reg .b64 %rd<5>;
    .reg .f32 %f<2>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    ld.global.f32 %f1, [%rd4];
    st.global.f32 [%rd3], %f1;
    ret;
}
"""
MODULE, FUNCTION, KERNEL, LIBRARY = 0x100, 0x200, 0x300, 0x400
TO, FROM = 1 << 40, 2 << 40
READ, WRITE = AccessFlag.READ | AccessFlag.INEXACT, AccessFlag.WRITE | AccessFlag.INEXACT


def arguments(to: int = TO + 16, source: int = FROM) -> bytes:
    return struct.pack("<QQI", to, source, 3)


@pytest.fixture
def launches():
    found = Launches({}.get)
    found.code.loaded(MODULE, ImageKind.TEXT, 0, PTX)
    found.code.found(FUNCTION, MODULE, "copy")
    return found


@pytest.fixture
def memory():
    device = LiveMemory()
    device.add(TO, 4096)
    device.add(FROM, 512)
    return device


def test_a_launch_touches_the_allocations_that_its_pointers_lie_in(launches, memory):
    found = launches.judge(FUNCTION, "copy", 0, arguments(), (memory,))
    assert [(TO, 4096, WRITE), (FROM, 512, READ)] == list(found.accesses)
    assert not found.doubts and not found.flags


def test_a_block_of_a_pool_counts_rather_than_the_whole_allocation(launches, memory):
    launches.blocks.add(TO, 128)
    assert (TO, 128, WRITE) in launches.judge(FUNCTION, "copy", 0, arguments(), (memory,)).accesses
    launches.blocks.remove(TO)
    assert (TO, 4096, WRITE) in launches.judge(FUNCTION, "copy", 0, arguments(), (memory,)).accesses


def test_a_pointer_to_no_known_memory_is_a_doubt(launches, memory):
    found = launches.judge(FUNCTION, "copy", 0, arguments(source=3 << 40), (memory,))
    assert "unknown address" == found.doubts
    assert [(TO, 4096, WRITE)] == list(found.accesses)


@pytest.mark.parametrize("case", ["other function", "no arguments", "flagged", "machine code"])
def test_nothing_is_said_of_what_is_not_known(launches, memory, case):
    function, given, flags = FUNCTION, arguments(), 0
    if case == "other function":
        function = 0x999
    elif case == "no arguments":
        given = None
    elif case == "flagged":
        flags = LaunchRowFlag.ARGUMENTS_UNKNOWN
    else:
        launches.code.loaded(MODULE, ImageKind.MACHINE_CODE, 77, None)
    found = launches.judge(function, "copy", flags, given, (memory,))
    assert ((), "") == (tuple(found.accesses), found.doubts)


def test_arguments_that_are_too_few_for_the_kernel_say_nothing(launches, memory):
    assert () == tuple(launches.judge(FUNCTION, "copy", 0, arguments()[:8], (memory,)).accesses)


def test_machine_code_has_the_ptx_that_its_compiler_kept():
    code = LoadedCode({77: PTX}.get)
    code.loaded(MODULE, ImageKind.MACHINE_CODE, 77, None)
    code.found(FUNCTION, MODULE, "copy")
    assert ["to", "from", "n"] == [one.name for one in code.kernel(FUNCTION, "copy").accesses.parameters]


def test_a_function_of_a_kernel_and_a_module_of_a_library_are_followed():
    code = LoadedCode({}.get)
    code.loaded(LIBRARY, ImageKind.TEXT, 0, PTX)
    code.found(KERNEL, LIBRARY, "copy")
    code.same(FUNCTION, KERNEL)
    code.same(MODULE, LIBRARY)
    code.found(0x201, MODULE, "copy")
    assert code.kernel(FUNCTION, "") is code.kernel(FUNCTION, "") is not None
    assert code.kernel(0x201, "") is not None


def test_handles_of_unloaded_code_are_forgotten():
    code = LoadedCode({}.get)
    code.loaded(MODULE, ImageKind.TEXT, 0, PTX)
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is not None
    code.unloaded(MODULE)
    assert code.kernel(FUNCTION, "copy") is None


@pytest.mark.parametrize("kind", ImageKind)
def test_handles_of_unloaded_code_are_forgotten_though_nothing_was_known_of_it(kind):
    """The next module may get its handle, and have a kernel of that name."""
    code = LoadedCode({}.get)
    code.loaded(MODULE, kind, 0, None)
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is None
    code.unloaded(MODULE)
    code.loaded(MODULE, ImageKind.TEXT, 0, PTX)
    assert code.kernel(FUNCTION, "other") is None
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is not None


def test_a_module_loaded_from_a_file_has_the_files_ptx(tmp_path):
    (tmp_path / "copy.ptx").write_bytes(PTX)
    code = LoadedCode({}.get)
    code.loaded_from(MODULE, str(tmp_path / "copy.ptx"), _cupti.digest)
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is not None


def test_damaged_ptx_is_no_error_but_unknown():
    code = LoadedCode({}.get)
    code.loaded(MODULE, ImageKind.TEXT, 0, b".version nonsense {")
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is None


def test_live_memory_finds_what_a_brute_search_finds():
    random = np.random.default_rng(7)
    memory, live = LiveMemory(), {}
    for _ in range(2000):
        start = int(random.integers(0, 64)) * 100
        if start in live and random.random() < 0.5:
            assert live.pop(start) == memory.remove(start)
        else:
            live[start] = int(random.integers(1, 101))
            memory.add(start, live[start])
        address = int(random.integers(0, 6500))
        expected = [(start, size) for start, size in live.items() if start <= address < start + size]
        assert expected == ([found] if (found := memory.find(address)) else [])
    assert memory.remove(99) is None


def test_bytes_are_found_by_their_offset_from_the_beginning_of_the_log():
    pointed = Pointed()
    pointed.add(0, b"abcdef")
    pointed.add(6, b"ghi")
    assert (b"bc", b"", b"ghi") == (pointed.find(1, 2), pointed.find(6, 0), pointed.find(6, 3))
    assert pointed.find(1, 2) is None  # was read: rows come in the order of their offsets
    assert pointed.find((1 << 64) - 1, 4) is None


def test_of_a_module_with_many_kernels_only_the_one_that_runs_is_read():
    """A text after which no other kernel's body can be parsed: only this one's is."""
    others = b"".join(
        PTX[PTX.index(b".visible") :]
        .replace(b"copy", b"k%d" % n)
        .replace(b"ld.global.f32", b'// a comment with }\n{\n}\n.pragma "}"; no such thing')
        for n in range(3)
    )
    for text in (PTX + others, PTX[: PTX.index(b".visible")] + others + PTX[PTX.index(b".visible") :]):
        code = LoadedCode({}.get)
        code.loaded(MODULE, ImageKind.TEXT, 0, text)
        code.found(FUNCTION, MODULE, "copy")
        code.found(FUNCTION + 1, MODULE, "k1")
        assert ["to", "from", "n"] == [one.name for one in code.kernel(FUNCTION, "copy").accesses.parameters]
        assert code.kernel(FUNCTION + 1, "k1") is None


OTHER = PTX.replace(b"st.global.f32 [%rd3], %f1;", b"ld.global.f32 %f1, [%rd3];")  # reads both
STREAMS, DEVICES, THREADS = (0, 2, 0x5000), (0, 1), (1, 2)
UNKNOWN = 0x999  # a function of code that is not at hand


def random_rows(random, blob: bytearray, numbers: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """What, stack and words of calls: launches, and what changes the memory and the code that they mean."""
    for _ in range(2000):
        if random.random() < 0.2:
            stream = int(random.choice(STREAMS))
            yield numbers["cuEventRecord"], 0, 0x6000, stream
            yield numbers["cuStreamWaitEvent"], 0, stream, 0x6000, 0
            yield numbers["cuLaunchHostFunc"], 0, stream
        what = random.random()
        if what < 0.85:
            offset, function = len(blob), int(random.choice([FUNCTION, FUNCTION, FUNCTION + 1, FUNCTION + 1, UNKNOWN]))
            pointers = [int(random.choice([TO, TO + 200, FROM, 7, 3 << 40])) for _ in range(2)]
            given = arguments(*pointers)[: int(random.choice([20, 20, 20, 20, 20, 8]))]
            blob += given
            flags = int(random.choice([0, LaunchRowFlag.PROGRAMMATIC, LaunchRowFlag.PER_THREAD]))
            flags |= LaunchRowFlag.ARGUMENTS_UNKNOWN * (random.random() < 0.1)
            grid, shared = int(random.integers(1, 9)), int(random.integers(0, 3))
            stream, stack = int(random.choice(STREAMS)), int(random.integers(0, 2))
            yield What.LAUNCH, stack, function, stream, grid, 128, shared | flags << 32, offset, len(given), 1
        elif what < 0.92:
            kind = What.POOL_ALLOC if random.random() < 0.6 else What.POOL_FREE
            yield kind, 0, TO, 128 * int(random.integers(1, 3)), 1
        elif what < 0.96:
            yield numbers[str(random.choice(["cuMemAlloc_v2", "cuMemFree_v2"]))], 0, TO, 4096
        elif what < 0.99:
            yield numbers["cuMemAllocHost_v2"], 0, 3 << 40, 64
        else:
            yield -1, 0, int(random.integers(0, 2))  # other code has the same handle


@pytest.mark.parametrize("seed", range(4))
def test_a_launch_is_reported_again_only_while_all_that_it_depends_on_is_the_same(seed, monkeypatch):
    """Against what Python makes of each launch by itself, for random launches, memory and code that come and go."""
    random = np.random.default_rng(seed)
    calls = CALLS | CALLS_OF_CODE
    numbers = {name: number for number, name in enumerate(calls, 1)}
    blob = bytearray()
    rows = list(random_rows(random, blob, numbers))

    def recorded() -> tuple[npt.NDArray[np.void], list[tuple[Any, ...]]]:
        """Return the records, with the place of each correlation instead, and what Python was asked."""
        asked = []
        tables, found = Tables(), Launches({}.get)
        tables.add([b"copy"], [b"\1\0\0\0file\0f"], [np.array([0, 0, 1], np.uint32).tobytes()], [])
        judge = found.judge
        monkeypatch.setattr(found, "judge", lambda *facts: asked.append(facts) or judge(*facts))
        events = CallEvents(
            calls,
            {number: name for name, number in numbers.items()},
            tables,
            enqueued := Enqueued(),
            found,
            pytorch_is_watched=lambda: False,
            blocks_are_watched=lambda: False,
            source=lambda event: None,
        )
        for function in (FUNCTION, FUNCTION + 1):
            found.code.loaded(function << 8, ImageKind.TEXT, 0, PTX)
            found.code.found(function, function << 8, "copy")
        events.pointed.add(0, bytes(blob))
        batch: list[tuple[int, ...]] = []

        def read() -> None:
            made = np.zeros(len(batch), ROW)
            for at, (number, what, stack, *words) in enumerate(batch):
                made[at] = number, what, 0, THREADS[number % 2], number + 1, stack, DEVICES[number % 3 == 0], 0, 0
                made["words"][at, : len(words)] = words
            if batch:
                events.read(made)
            batch.clear()

        for number, (what, stack, *words) in enumerate(rows):
            if what == -1:
                read()
                found.code.loaded(FUNCTION << 8, ImageKind.TEXT, 0, OTHER if words[0] else PTX)
                found.code.found(FUNCTION, FUNCTION << 8, "copy")
            else:
                batch.append((number, what, stack, *words))
            if number % 400 == 399:
                read()
        read()
        events._send()
        made = np.concatenate(events._out)
        made = made[made["kind"] != Kind.STREAM_CREATE]  # streams are reported once in a process
        ran = np.zeros(len(rows), ROW)
        ran["correlation"] = np.arange(1, len(rows) + 1)
        enqueued_by = enqueued.of(ran).calls
        enqueued_by = enqueued_by[enqueued_by[:, 0] != 0]
        assert enqueued_by[:, 1].tolist() == made["correlation"][made["kind"] == Kind.KERNEL_LAUNCH].tolist()
        assert enqueued_by[:, 2].tolist() == made["stream"][made["kind"] == Kind.KERNEL_LAUNCH].tolist()
        places: dict[int, int] = {0: 0}
        made["correlation"] = [places.setdefault(one, len(places)) for one in made["correlation"].tolist()]
        return made, asked

    recorded()  # the streams have numbers now
    again, asked = recorded()
    monkeypatch.setattr(CallEvents, "_keep_launch", lambda self, key, reported: None)
    each, asked_each = recorded()
    assert again.tolist() == each.tolist()
    launches = sum(what == What.LAUNCH for what, *_ in rows)
    assert launches == len(asked_each) and len(asked) < launches * 0.6
    unknown = [flags for function, _, flags, *_ in asked if function == UNKNOWN]
    known_arguments = [flags for flags in unknown if not flags & LaunchRowFlag.ARGUMENTS_UNKNOWN]
    assert len(known_arguments) < 60, "of code that is not known, nothing depends on the arguments"
    assert {AccessFlag.READ | AccessFlag.INEXACT, WRITE} <= {*again["flags"][again["kind"] == Kind.ACCESS].tolist()}


def test_launches_between_other_calls_are_not_looked_at_one_by_one(monkeypatch):
    """As JAX's are, each of which an event follows: Python took most of a processor, and the interpreter's lock, for them."""
    asked: list[tuple[Any, ...]] = []
    with judging_launches(monkeypatch) as launching:
        log, judge = launching.log, Launches.judge
        monkeypatch.setattr(Launches, "judge", lambda *facts: asked.append(facts) or judge(*facts))
        put_code(log)
        log.put("cuEventCreate", 0x6000, 0, time=8)
        for time in range(20, 120):
            put_launch(log, time=time)
            log.put("cuEventRecord", 0x6000, 0, time=time)
            log.put("cuStreamWaitEvent", 0, 0x6000, 0, time=time)
            log.put("cuLaunchHostFunc", 0, time=time)
        launching.collector.flush()
        kinds = Counter(event.kind for event in launching.events)
    assert 2 == len(asked)  # the first launch says where pointers lie in its arguments, the second is kept
    assert [100] * 3 == [kinds[kind] for kind in (Kind.KERNEL_LAUNCH, Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT)]
    assert 1 == sum(event.name == "cuLaunchHostFunc is not recorded on a GPU" for event in launching.events)


@pytest.mark.parametrize("seed", range(4))
def test_a_launch_of_which_only_the_call_is_reported_is_what_python_makes_of_it(seed, monkeypatch):
    """With ``--level launches``: against the records that Python makes of the same calls, one at a time."""

    def recorded() -> list[tuple[Any, ...]]:
        random = np.random.default_rng(seed)
        with judging_launches(monkeypatch, judges=False) as launching:
            log = launching.log
            log.names += [b"_Z3addPf", b"scale"]
            stacks = [0, log.call("libcudart.so", ("/a/program.py", 3))]
            log.put("cuEventCreate", 0x6000, 0, time=8)
            for time in range(10, 200):
                what = {"time": time, "stack": int(random.choice(stacks)), "correlation": time}
                if random.random() < 0.3:
                    log.put("cuEventRecord", 0x6000, int(random.choice(STREAMS)), **what)
                    continue
                flags = LaunchRowFlag.ARGUMENTS_UNKNOWN | LaunchRowFlag(int(random.choice([0, 1, 2, 8, 16])))
                words = int(random.choice(STREAMS)), int(random.integers(1, 9)), 128, 64 | flags << 32, 0, 0
                log.put(
                    What.LAUNCH, 0x20, *words, int(random.integers(1, 3)), **what, device=int(random.choice(DEVICES))
                )
            launching.collector.flush()
            correlations: dict[int, int] = {0: 0}
            return [
                one._replace(correlation=correlations.setdefault(one.correlation, len(correlations)))
                for one in launching.events
                if one.kind != Kind.STREAM_CREATE  # streams are reported once in a process
            ]

    recorded()  # the streams have numbers now
    found = recorded()
    assert {"add", "scale"} == {event.name.partition("(")[0] for event in found if event.kind == Kind.KERNEL_LAUNCH}
    asked: list[Any] = []
    by_python = CallEvents._launch
    monkeypatch.setattr(CallEvents, "_launch", lambda self, row, name: asked.append(row) or by_python(self, row, name))
    assert recorded() == found
    few = len(asked)  # nodes of graphs, which did not run, and the first launch on each stream
    texts_of = CallEvents._texts_of
    none = np.empty(0, np.uint32)
    monkeypatch.setattr(
        CallEvents,
        "_texts_of",
        lambda self, names, known: none if known is self._kernel_texts else texts_of(self, names, known),
    )
    assert recorded() == found
    launches = len([event for event in found if event.kind == Kind.KERNEL_LAUNCH])
    assert few < launches / 2 and len(asked) - few >= launches
