"""What a recording has of the ranges that libraries give to NVTX, on the software device and beside CUPTI."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import cudatool as ct
from cudatool.analyze.ranges import ranges
from cudatool.collect import _nvtx
from cudatool.collect.nvtx_ranges import RangeLog, nvtx_ranges
from cudatool.nvtx import _ranges
from cudatool.recording import record
from cudatool.trace import Trace, hooks, read
from cudatool.trace.events import Kind, WarningCode

_HERE = Path(__file__).with_name("native")
sys.path.insert(0, str(_HERE))

from fake_nvtx import Nvtx, event  # noqa: E402

_PATH = os.pathsep.join(filter(None, (str(_HERE), os.environ.get("PYTHONPATH"))))
_OF_RANGES = (Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.RANGE_START, Kind.RANGE_END, Kind.MARK)


@pytest.fixture(scope="module")
def nvtx() -> Nvtx:
    return Nvtx()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    return tmp_path / "t.ctrace"


def told(trace: Trace) -> list[tuple[str, str]]:
    """Return the kinds and names of a trace's ranges and allocations, in order."""
    kinds = [Kind(kind) for kind in trace.records["kind"].tolist()]
    names = [trace.names[name] for name in trace.records["name"].tolist()]
    return [(k.name, n) for k, n in zip(kinds, names, strict=True) if k in (*_OF_RANGES, Kind.BLOCK_ALLOC)]


def test_ranges_and_allocations_stand_in_the_order_in_which_they_happened(nvtx, path):
    with record(path):
        nvtx.push(b"step")
        held = [ct.ones(100, "f4")]
        nvtx.push_wide("inner \u00e9\u20ac\U0001f600")
        nvtx.pop()
        held.append(ct.ones(100, "f4"))
        nvtx.pop()
        nvtx.mark(b"done")
        number = nvtx.start(b"anywhere")
        nvtx.end(number)
    trace = read(path)
    expected = [
        *[
            ("RANGE_PUSH", "step"),
            ("BLOCK_ALLOC", ""),
            ("RANGE_PUSH", "inner \u00e9\u20ac\U0001f600"),
            ("RANGE_POP", ""),
        ],
        *[("BLOCK_ALLOC", ""), ("RANGE_POP", ""), ("MARK", "done"), ("RANGE_START", "anywhere"), ("RANGE_END", "")],
    ]
    assert expected == told(trace)
    of_this_thread = trace.records["time"][trace.records["thread"] == hooks.thread_id()]
    assert (of_this_thread[1:] >= of_this_thread[:-1]).all()


def test_without_a_tool_push_and_pop_return_what_they_do_with_this_one(nvtx, path):
    assert -2 == nvtx.push(b"a") == nvtx.pop()  # NVTX_NO_PUSH_POP_TRACKING
    with record(path):
        assert -2 == nvtx.push(b"a") == nvtx.pop()


def test_a_range_that_began_before_the_recording_has_no_end_in_it(nvtx, path):
    nvtx.push(b"before")
    number = nvtx.start(b"before")
    with record(path):
        nvtx.push(b"during")
        nvtx.pop()
        nvtx.pop()
        nvtx.end(number)
        nvtx.push(b"left open")
    nvtx.pop()
    assert [("RANGE_PUSH", "during"), ("RANGE_POP", ""), ("RANGE_PUSH", "left open")] == told(read(path))
    with record(path, force=True):
        nvtx.pop()
    assert [] == told(read(path))


def test_a_recording_inside_of_another_has_nothing_from_before_it_began(nvtx, path, tmp_path):
    inner = tmp_path / "inner.ctrace"
    with record(path):
        nvtx.push(b"before")
        nvtx.pop()
        with record(inner):
            nvtx.mark(b"during")
    assert [("MARK", "during")] == told(read(inner))
    assert [("RANGE_PUSH", "before"), ("RANGE_POP", ""), ("MARK", "during")] == told(read(path))


def test_the_environment_stays_as_it_is_where_other_threads_may_read_it(nvtx, path):
    """What has met the tool in an earlier recording is recorded nevertheless."""
    log, before, events = RangeLog(), dict(os.environ), []
    hooks.subscribe(events.append)
    try:
        with nvtx_ranges(log, may_set=False):
            assert before == dict(os.environ)
            nvtx.mark(b"here")
    finally:
        hooks.unsubscribe(events.append)
    assert ["here"] == [event.name for event in events if event.kind is Kind.MARK]


def test_domains_nest_their_ranges_each_for_itself(nvtx, path):
    one, other = nvtx.create(b"one"), nvtx.create(b"other")
    kept = nvtx.register(one, b"kept")
    with record(path):
        nvtx.push(b"step")
        nvtx.domain_push(one, event("", registered=kept))
        nvtx.domain_push(other, event("b"))
        nvtx.pop()
        nvtx.domain_pop(one)
        nvtx.domain_push(one, event("c"))
        nvtx.domain_pop(other)
        nvtx.domain_pop(one)
        nvtx.domain_pop(one)  # nothing is left to pop
    trace = read(path)
    marks = trace.records[trace.records["kind"] >= Kind.RANGE_START]
    began = {int(row["aux0"]): trace.names[int(row["name"])] for row in marks if row["kind"] == Kind.RANGE_START}
    ended = [began[int(row["aux0"])] for row in marks if row["kind"] == Kind.RANGE_END]
    assert ["one: kept", "other: b", "one: c"] == list(began.values())
    assert ["one: kept", "other: b", "one: c"] == ended
    assert {"step", "one: kept", "other: b", "one: c"} == {trace.names[name] for name in ranges(trace, 0).name}


def test_threads_without_the_interpreters_lock_lose_no_range(nvtx, path):
    """ctypes calls these functions without it."""

    def work(number: int) -> None:
        for step in range(500):
            nvtx.push(f"{number}.{step}".encode())
            nvtx.pop()

    with record(path):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            ct.ones(100, "f4")
        for thread in threads:
            thread.join()
    trace = read(path)
    pushed = [name for kind, name in told(trace) if kind == "RANGE_PUSH"]
    assert Counter(f"{number}.{step}" for number in range(4) for step in range(500)) == Counter(pushed)
    threads_of = trace.records["thread"][trace.records["kind"] == Kind.RANGE_POP]
    assert [500] * 4 == list(Counter(threads_of.tolist()).values())


def test_own_ranges_are_there_once_and_not_given_to_nvtx(nvtx, path, monkeypatch):
    class Library:
        push = staticmethod(lambda text: nvtx.push(text.encode()))
        pop, end = staticmethod(nvtx.pop), staticmethod(nvtx.end)
        start = staticmethod(lambda text: nvtx.start(text.encode()))
        mark = staticmethod(lambda text: nvtx.mark(text.encode()))

    monkeypatch.setattr(_ranges, "nvtx", Library)
    before = ct.nvtx.range_start("before")
    with record(path):
        with ct.nvtx.range("own"):
            ct.nvtx.mark("here")
        ct.nvtx.range_end(ct.nvtx.range_start("any"))
        ct.nvtx.range_end(before)
    expected = [("RANGE_PUSH", "own"), ("MARK", "here"), ("RANGE_POP", ""), ("RANGE_START", "any"), ("RANGE_END", "")]
    assert expected == told(read(path))


def test_a_tool_of_the_users_stays_and_the_trace_names_it(path, monkeypatch):
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/profiler/libtool.so")
    with record(path):
        assert "/opt/profiler/libtool.so" == os.environ["NVTX_INJECTION64_PATH"]
    assert "/opt/profiler/libtool.so" == os.environ["NVTX_INJECTION64_PATH"]
    assert "/opt/profiler/libtool.so" == read(path).header["nvtx_tool"]


@pytest.mark.parametrize(
    ("name", "function", "shown"),
    [
        ("torch.cuda.nvtx", "range_push", "torch.cuda.nvtx"),
        ("cupy_backends.cuda.libs.nvtx", "RangePush", "cupy.cuda.nvtx"),
        ("nvtx.nvtx", "libnvtx_push_range", "nvtx"),
    ],
)
@pytest.mark.parametrize("is_heard", [False, True])
def test_a_package_whose_ranges_do_not_arrive_is_named_once(nvtx, path, monkeypatch, name, function, shown, is_heard):
    package = ModuleType(name)

    def push(text: str) -> int:
        if not text:
            raise RuntimeError("NVTX functions not installed")
        return nvtx.push(text.encode()) if is_heard else -2

    setattr(package, function, push)
    monkeypatch.setitem(sys.modules, name, package)
    with record(path):
        with pytest.raises(RuntimeError):
            getattr(package, function)("")
        for _ in range(3):
            assert -2 == getattr(package, function)("step")
        assert push is getattr(package, function)  # looked at once
    trace = read(path)
    warnings = trace.of_kind(Kind.WARNING)
    assert ([] if is_heard else [WarningCode.RANGES_NOT_RECORDED]) == warnings["aux0"].tolist()
    if not is_heard:
        assert trace.names[int(warnings["name"][0])].startswith(f"ranges of {shown} are not recorded: ")
    with record(path, force=True):
        kept = getattr(package, function)
        assert push is not kept
    assert push is getattr(package, function)
    with record(path, force=True):
        kept("of an earlier recording")
    assert not len(read(path).of_kind(Kind.WARNING))


def test_the_environment_is_as_before_when_the_recording_has_ended(path, monkeypatch):
    with record(path):
        assert _nvtx.__file__ == os.environ["NVTX_INJECTION64_PATH"]
    assert "NVTX_INJECTION64_PATH" not in os.environ
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/elsewhere/_nvtx.cpython-312.so")  # of a parent with another Python
    with record(path, force=True):
        assert _nvtx.__file__ == os.environ["NVTX_INJECTION64_PATH"]
    assert "/elsewhere/_nvtx.cpython-312.so" == os.environ["NVTX_INJECTION64_PATH"]


_UNUSED = """
import sys
import cudatool as ct
from cudatool.recording import record
from cudatool.trace import hooks
with record(sys.argv[1], on_oom=False):
    ct.ones(10, "f4")
    print(len(hooks._subscribers))
    from fake_nvtx import Nvtx
    nvtx = Nvtx()
    ct.ones(10, "f4")
    print(len(hooks._subscribers))
    nvtx.push(b"step")
    ct.ones(10, "f4")
    nvtx.pop()
"""


def test_a_program_that_uses_no_nvtx_has_no_subscriber_for_it(path):
    environment = {**os.environ, "PYTHONPATH": _PATH, "CUDATOOL_DEVICE": "sim:memory=64MiB"}
    done = subprocess.run(
        [sys.executable, "-c", _UNUSED, path], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    before, after = map(int, done.stdout.split())
    assert before + 1 == after
    assert [kind for kind, _ in told(read(path))][-3:] == ["RANGE_PUSH", "BLOCK_ALLOC", "RANGE_POP"]


def test_the_package_nvtx_is_recorded(path):
    pytest.importorskip("nvtx")
    text = """
import sys
from cudatool.recording import record
with record(sys.argv[1]):
    import nvtx
    with nvtx.annotate("step", color="blue"), nvtx.annotate("inner", domain="mine"):
        nvtx.mark("here")
"""
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim:memory=64MiB"}
    subprocess.run([sys.executable, "-c", text, path], env=environment, check=True, timeout=120)
    expected = [
        *[("RANGE_PUSH", "step"), ("RANGE_START", "mine: inner"), ("MARK", "here")],
        *[("RANGE_END", ""), ("RANGE_POP", "")],
    ]
    assert expected == told(read(path))


def test_a_child_process_forked_in_a_recording_goes_on_with_nvtx(nvtx, path):
    with record(path):
        child = os.fork()
        if not child:
            nvtx.push(b"child")
            nvtx.pop()
            os._exit(0)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        nvtx.push(b"parent")
        nvtx.pop()
    assert [("RANGE_PUSH", "parent"), ("RANGE_POP", "")] == told(read(path))


_BESIDE_CUPTI = """
import sys
from pooled import *
from cudatool.collect.nvtx_ranges import nvtx_ranges
cuda, driver = prepare(sys.argv[1])
with recorded() as events, nvtx_ranges(None):
    from fake_nvtx import Nvtx
    nvtx = Nvtx()
    nvtx.push(b"step")
    driver.malloc(512)
    nvtx.pop()
    nvtx.end(nvtx.start(b"any"))
for event in events:
    print(event.kind.name, event.name, event.device)
print(all(a.time <= b.time for a, b in zip(events, events[1:])))
with recorded() as events, nvtx_ranges(None):
    for step in range(20_000):
        nvtx.push(f"step {step}".encode())
        nvtx.pop()
        if not step % 100:
            hooks.emit(Kind.MARK, name="now")
names = [event.name for event in events if event.kind is Kind.RANGE_PUSH]
print(names == [f"step {step}" for step in range(20_000)])
print(max(len(collector._calls._reporter.texts) for collector in cupti._running) < 5000)
"""


def test_beside_cupti_ranges_come_in_the_order_of_the_drivers_calls_and_leave_no_names(libcupti):
    environment = {**os.environ, "PYTHONPATH": _PATH}
    done = subprocess.run(
        [sys.executable, "-c", _BESIDE_CUPTI, libcupti], env=environment, capture_output=True, text=True, timeout=120
    )
    assert not done.stderr
    expected = [
        "RANGE_PUSH step -1",
        "MEM_ALLOC cuMemAlloc_v2 0",
        "RANGE_POP  -1",
        "RANGE_START any -1",
        "RANGE_END  -1",
    ]
    assert [*expected, "True", "True", "True"] == done.stdout.splitlines()
