"""`cudatool.record` from within a program."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from warm_process import run_python

from cudatool.trace.events import Event, Kind
from cudatool.trace.reader import read

_PROGRAM = """
import os; os.environ["CUDATOOL_DEVICE"] = "sim"
import numpy as np
import cudatool as ct
ct.zeros(4).fill_(1)              # before: not recorded
with ct.record("t.ctrace", device="sim", measure_accesses=True):
    x = ct.zeros(16, np.float32)
    kernel = ct.compile('extern "C" __global__ void one(float *x) { x[threadIdx.x] = 1; }', "one")
    with ct.range("mine"):
        kernel[1, 16](x)
x.fill_(2)                        # after: not recorded
"""


def test_what_happens_inside_is_recorded_and_nothing_else(tmp_path):
    done = run_python(_PROGRAM, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "t.ctrace")
    (launch,) = trace.of_kind(Kind.KERNEL_LAUNCH)
    assert len(trace.of_kind(Kind.MEMSET)) == 1
    (access,) = [a for a in trace.of_kind(Kind.ACCESS) if a["correlation"] == launch["correlation"]]
    assert int(access["size"]) == 64
    (named,) = trace.of_kind(Kind.RANGE_PUSH)
    assert trace.names[int(named["name"])] == "mine"


_MISTAKEN = """
import threading
import cudatool as ct
from cudatool.errors import UsageError
from cudatool.recording import is_observing
from cudatool.trace import hooks
before = threading.Thread.start
try:
    with ct.record("t.ctrace", device="sim", measure_accesses=True, checks=["memchek"]):
        pass
except UsageError as error:
    print(error)
print(hooks.active, hooks.wants_accesses, hooks.measures_accesses, is_observing(), threading.Thread.start is before)
"""


def test_recording_that_cannot_begin_leaves_nothing_changed(tmp_path):
    done = run_python(_MISTAKEN, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said, state = done.stdout.splitlines()
    assert said == "there is no check of kernels 'memchek'; did you mean 'memcheck'?"
    assert "False False False False True" == state


MIDDLE = """
import json, numpy as np, cudatool as ct
from cudatool.analyze import report
from cudatool.trace import read

kept = [ct.zeros(1 << 20, np.float32) for _ in range(2)]
small = ct.zeros(100, np.float32)
side = ct.Stream()
with ct.stream(side):
    other = ct.zeros(1000, np.float32)
ct.synchronize()
with ct.record("middle.ctrace"):
    new = ct.zeros(1 << 10, np.float32)
    del kept[0]
    ct.synchronize()
    told = [ct.memory_allocated(), ct.memory_reserved()]
trace = read("middle.ctrace")
(device,) = report(trace).summary.devices
print(json.dumps([told, [device.now.allocated, device.peak_reserved], trace.notes]))
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_recording_begun_in_the_middle_of_a_program_starts_with_what_lives(tmp_path, conf):
    environment = {"CUDATOOL_DEVICE": "sim", "CUDATOOL_ALLOC_CONF": conf}
    done = run_python(MIDDLE, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    told, recorded, notes = json.loads(done.stdout)
    assert (recorded, notes) == (told, [])


def test_what_lived_before_the_recording_began_is_no_leak(tmp_path):
    program = """
import numpy as np, cudatool as ct
from cudatool.sanitize import check
from cudatool.trace import read

before = [ct.empty(1000, np.float32) for _ in range(3)]
with ct.record("middle.ctrace"):
    del before[0]
    new = ct.empty(5000, np.float32)
print([(one.count, one.buffer.size) for one in check(read("middle.ctrace"), ("leak",)).on_device])
"""
    done = run_python(program, folder=tmp_path, environment={"CUDATOOL_DEVICE": "sim"})
    assert (done.returncode, done.stdout) == (0, "[(1, 20480)]\n"), done.stderr


DRIVERS_MEMORY = """
import json
import cudatool as ct
ct.init()
from cuda.bindings import driver
from cuda.core import Device, LegacyPinnedMemoryResource, ManagedMemoryResource
from cudatool.analyze import report
from cudatool.sanitize import check
from cudatool.trace import read

device = Device()
device.set_current()
stream = device.create_stream()
pool = device.memory_resource.allocate(8 << 20, stream=stream)
_, plain = driver.cuMemAlloc(4 << 20)
_, freed = driver.cuMemAlloc(32 << 20)
driver.cuMemFree(freed)
pinned = LegacyPinnedMemoryResource().allocate(1 << 20)
cached = ct.zeros(1 << 18) if CACHED else None
with ct.record("middle.ctrace"):
    new = device.memory_resource.allocate(2 << 20, stream=stream)
    pool.close(stream=stream)
    stream.sync()
    left = new if KEPT else new.close(stream=stream)
trace = read("middle.ctrace")
found = report(trace)
(summary,) = found.summary.devices
print(json.dumps({
    "now": summary.now.allocated,
    "peak": [summary.peak.allocated, summary.peak_reserved],
    "lint": [one.message for one in found.findings],
    "leaks": [one.buffer.size for one in check(trace, ("leak",)).on_device],
}))
driver.cuMemFree(plain)
pinned.close()
"""


@pytest.mark.parametrize("cached", [0, 1], ids=["the driver's alone", "with cached blocks"])
@pytest.mark.parametrize("kept", [0, 1], ids=["given back", "kept"])
def test_recording_begun_in_the_middle_starts_with_the_drivers_live_memory(tmp_path, cached, kept):
    program = DRIVERS_MEMORY.replace("CACHED", str(cached)).replace("KEPT", str(kept))
    done = run_python(program, folder=tmp_path, environment={"CUDATOOL_DEVICE": "sim"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    held = cached << 20
    assert found["now"] == (4 << 20) + (kept << 21) + held
    assert found["peak"] == [(14 << 20) + held, (14 << 20) + 2 * held]
    assert found["lint"] == []
    assert found["leaks"] == [2 << 20] * kept


@pytest.mark.parametrize(("waits", "expected"), [(False, ["in-flight-before"]), (True, [])])
def test_work_in_flight_as_a_recording_begins_is_named_as_not_checked(tmp_path, waits, expected):
    from cudatool.sanitize import check

    done = run_python(
        "import cudatool as ct\nx = ct.zeros(16)\nside = ct.Stream()\nct.synchronize()\nwith side: x.fill_(1)\n"
        f"{'side.synchronize()' if waits else 'side.record_event()'}\n"
        "with ct.record('t.ctrace', measure_accesses=True):\n    x.fill_(2)\n    ct.synchronize()\n",
        folder=tmp_path,
        environment={"CUDATOOL_DEVICE": "sim"},
    )
    assert 0 == done.returncode, done.stderr
    report = check(read(tmp_path / "t.ctrace"), ["race"])
    assert expected == [code for gap in report.gaps for code in gap.codes]


def test_what_pytorch_held_is_named_as_missing_where_its_blocks_are_not_recorded(monkeypatch):
    from cudatool.recording import gpu
    from cudatool.sanitize.coverage import find_gaps
    from cudatool.trace.events import RECORD
    from cudatool.trace.model import Trace

    on_a_gpu = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=lambda device: 2 << 20
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=on_a_gpu))
    said = gpu.living([]).unknown
    assert said == ["4 MiB that PyTorch held when the recording began"]
    trace = Trace(np.zeros(0, RECORD), header={"device_kind": "cuda", "unknown_before": said})
    assert said[0] in [name for gap in find_gaps(trace, ("race",), operations=1) for name in gap.names]


def test_report_of_a_child_passes_on_what_was_logged_once_and_first(tmp_path, monkeypatch):
    from cudatool import recording
    from cudatool.recording.children import ChildSettings, _ChildRecorder

    settings = ChildSettings(str(tmp_path / "a.ctrace"), "", True, False, (), "kernels", True)
    recorder, seen = _ChildRecorder(settings, {}), []
    event = Event(1, Kind.MEM_ALLOC, 0, 0, 0, 0, 0, 0, "", 64, 64, 0, 0)

    def flush() -> None:
        seen.append(recorder._recorder is None)
        recorder(event)  # what was logged makes the trace

    monkeypatch.setattr(recording, "flush", flush)
    path = recorder.up_to_date()
    assert [True] == seen
    assert path is not None and 1 == len(read(path).of_kind(Kind.MEM_ALLOC))
    recorder.close()


@pytest.mark.parametrize("sees", [True, False])
def test_recording_says_whether_its_own_watch_sees_the_hosts_reads(monkeypatch: pytest.MonkeyPatch, sees: bool) -> None:
    from cudatool import recording
    from cudatool.sim.observe.host_watch import HostWatch

    monkeypatch.setattr(HostWatch, "sees_reads", property(lambda _: sees))
    with recording.sources(measure_accesses=True) as header:
        if header["device_kind"] != "sim":
            pytest.skip("a GPU's memory is not watched")
        assert header["watches_host_reads"] is sees


_NAMED = """
import cudatool as ct
from cudatool.errors import UsageError
from cudatool.trace import read
for given in ("memcheck, initcheck", ["memcheck"], "", "memcheck,"):
    with ct.record("a.ctrace", device="sim", checks=given, force=True):
        ct.zeros(4)
    print(read("a.ctrace").header["checks"])
for given in ("race", 5, [5]):
    try:
        with ct.record("b.ctrace", checks=given):
            pass
    except UsageError as error:
        print(error)
"""


def test_checks_of_kernels_are_named_by_a_text_or_a_list(tmp_path):
    done = run_python(_NAMED, folder=tmp_path)
    assert done.stdout.splitlines() == [
        "['memcheck', 'initcheck']",
        "['memcheck']",
        "[]",
        "['memcheck']",
        "there is no check of kernels 'race'; did you mean 'racecheck'?",
        "a check of kernels is named by a text, such as 'memcheck', not by 5",
        "a check of kernels is named by a text, such as 'memcheck', not by [5]",
    ], done.stderr
