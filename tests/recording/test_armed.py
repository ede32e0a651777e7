"""Armed processes: triggers, bounded files, and reports when memory runs out, in programs that do not record."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from warm_process import COMMAND_LINE, SCRIPT, run_python

from cudatool import _driver
from cudatool.analyze import blocks
from cudatool.errors import UsageError
from cudatool.recording import armed
from cudatool.recording.triggers import Metric, RangeOf, Reason, TriggerCondition, Watch
from cudatool.trace.events import Event, Kind
from cudatool.trace.reader import read

CARDS = [("GPU", 0xA0, 10), ("GPU", 0xB0, 80), ("MIG", 0xC0, 20)]  # as NVML numbers them: kind, UUID, bytes

_PROGRAM = """
import os, signal, time
import cudatool as ct
kept = []
def hog(n=20 << 20):
    kept.append(ct.empty(n, "u1"))
def wait(for_what):
    for _ in range(400):
        if for_what(): return
        time.sleep(0.02)
    raise SystemExit("nothing came")
"""


def _run(folder: Path, program: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program, under a command of cudatool's if there is one."""
    (folder / "job.py").write_text(_PROGRAM + program)
    main = COMMAND_LINE if command else SCRIPT
    return run_python(main, *command, "job.py", folder=folder, environment={"CUDATOOL_DEVICE": "sim:memory=256MiB"})


def _reasons(folder: Path) -> list[str]:
    names = sorted(folder.glob("job.*.ctrace"), key=lambda path: int(path.name.split(".")[2]))
    return [read(name).header["trigger"] for name in names]


@pytest.mark.parametrize(
    ("options", "work", "reasons"),
    [
        ("when='allocated > 50%'", "[hog() for _ in range(7)]; wait(lambda: armed.written)", ["condition"]),
        ("when='reserved >= 40MiB'", "hog(); hog(); hog(); wait(lambda: armed.written)", ["condition"]),
        (
            "when='allocated > 50%'",  # it swings around the limit
            "for _ in range(9): [hog() for _ in range(7)]; kept.clear()\nwait(lambda: armed.written)",
            ["condition"],
        ),
        ("when='allocated > 99%'", "hog()", []),
        ("every='50ms'", "hog(); wait(lambda: len(armed.written) > 1)\narmed.options", None),
        ("", "hog(); os.kill(os.getpid(), signal.SIGUSR2); wait(lambda: armed.written)", ["signal"]),
        ("", "hog(); print(ct.trigger('why')[0])", ["call"]),
        ("ranges='step:2-3'", "for n in range(5):\n    with ct.range('step'): hog(1 << 20)", ["range"]),
    ],
)
def test_trigger_writes_a_trace(tmp_path, options, work, reasons):
    done = _run(tmp_path, f"armed = ct.arm({options})\n{work}\narmed.close()\n")
    assert done.returncode == 0, done.stderr
    found = _reasons(tmp_path)
    if reasons is None:
        assert set(found) == {"interval"}
    else:
        assert found == reasons
    for path in tmp_path.glob("job.*.ctrace"):
        assert f"cudatool: wrote {path.name}" in done.stderr


def test_range_is_written_from_its_first_to_its_last(tmp_path):
    work = "for n in range(1, 6):\n    with ct.range('step'): hog(n << 20)"
    done = _run(tmp_path, f"armed = ct.arm(ranges='step:2-3')\n{work}\narmed.close()\n")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("job.*.ctrace")
    trace = read(path)
    start, stop, _ = trace.header["window"]
    inside = trace.records[len(trace.records) - (stop - start) :]
    allocated = inside[inside["kind"] == Kind.BLOCK_ALLOC]
    assert [2 << 20, 3 << 20] == allocated["aux0"].tolist()  # whatever the program does until they are written
    assert trace.names[int(inside[0]["name"])] == "step"


def test_memory_that_runs_out_is_explained_in_a_process_that_does_not_record(tmp_path):
    done = _run(tmp_path, "armed = ct.arm()\nwhile True: hog()\n")
    assert done.returncode == 1
    assert "OutOfMemoryError" in done.stderr.splitlines()[-1]
    (report,) = tmp_path.glob("job.*.oom.txt")
    text = report.read_text()
    assert text.startswith("Out of memory: job.py:6 (hog) requested 20 MiB")
    assert "job.py:6 (hog)" in text.partition("Held when memory ran out")[2]
    assert _reasons(tmp_path) == ["out-of-memory"]


def test_memory_that_was_held_before_arming_counts(tmp_path):
    done = _run(tmp_path, "hog(); hog()\narmed = ct.arm(when='allocated > 20%')\nhog()\narmed.close()")
    assert done.returncode == 0, done.stderr
    assert _reasons(tmp_path) == ["condition"]


def test_no_free_is_lost_while_a_process_is_armed(tmp_path):
    """Another thread frees at the worst moment: it has to wait until its free is seen."""
    program = """
import threading
from cudatool import recording
hog()
living, others = recording.living, []
def living_and_then_a_free():
    found = living()
    others.append(threading.Thread(target=kept.clear))
    others[0].start(); others[0].join(0.5)
    return found
recording.living = living_and_then_a_free
with ct.arm() as armed:
    others[0].join()
    hog(1 << 20)
    ct.trigger()
"""
    done = _run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("job.*.ctrace")
    held = blocks(read(path))
    assert [1 << 20] == held.size[held.freed == len(read(path).records)].tolist()


def test_recorded_process_that_is_armed_too_leaves_one_report(tmp_path):
    done = _run(tmp_path, "armed = ct.arm()\nwhile True: hog()\n", "run", "-o", "run.ctrace")
    assert done.returncode == 1
    assert [path.name for path in tmp_path.glob("*.oom.txt")] == ["run.oom.txt"]


def test_files_stay_bounded_and_the_newest_remain(tmp_path):
    done = _run(
        tmp_path,
        "armed = ct.arm(most_files=3, keep='1KiB')\nfor n in range(9):\n    hog(1 << 10); ct.trigger(str(n))\narmed.close()\n",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name.split(".")[2] for path in tmp_path.glob("job.*.ctrace")) == ["7", "8", "9"]


def test_trigger_that_fails_says_so_and_the_next_one_is_served(tmp_path):
    program = """
with ct.arm() as armed:
    hog()
    write, failures = armed._ring.write, iter([MemoryError("none left"), OSError("no file")])
    def failing(*words, **facts):
        for failure in failures:
            raise failure
        return write(*words, **facts)
    armed._ring.write = failing
    for count in (1, 1, 1):
        armed._request("signal", "SIGUSR2")
        wait(lambda: armed._requests.empty() and not armed._asked)
    wait(lambda: armed.written)
"""
    done = _run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert ["signal"] == _reasons(tmp_path)
    for what in ("MemoryError: none left", "OSError: no file"):
        assert f"cudatool: SIGUSR2: nothing was written: {what}" in done.stderr


def test_handler_of_the_program_stays(tmp_path):
    work = """
signal.signal(signal.SIGUSR2, lambda *_: print("mine"))
armed = ct.arm()
os.kill(os.getpid(), signal.SIGUSR2)
armed.close()
signal.signal(signal.SIGUSR2, signal.SIG_DFL)
with ct.arm(): pass
print(signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL)
"""
    done = _run(tmp_path, work)
    assert (done.returncode, done.stdout) == (0, "mine\nTrue\n"), done.stderr
    assert _reasons(tmp_path) == []


def test_signal_that_the_program_was_started_to_ignore_is_a_request_until_the_end(tmp_path):
    """``perf record`` starts programs so."""
    work = """
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
armed = ct.arm()
os.kill(os.getpid(), signal.SIGUSR2)
wait(lambda: armed.written)
armed.close()
print(signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN)
"""
    done = _run(tmp_path, work)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert _reasons(tmp_path) == ["signal"]


def test_forked_child_is_not_armed_and_can_be(tmp_path):
    work = """
armed = ct.arm()
child = os.fork()
if not child:
    print(ct.trigger(), flush=True)
    with ct.arm() as own:
        hog(1 << 10); own.trigger("child")
    os._exit(0)
os.waitpid(child, 0)
armed.close()
"""
    done = _run(tmp_path, work)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert _reasons(tmp_path) == ["call"]


def test_run_with_triggers_keeps_no_whole_trace(tmp_path):
    done = _run(
        tmp_path,
        "for n in range(9):\n    with ct.range('step'): hog()\n",
        *("run", "--when", "allocated > 50%", "--range", "step:2-4"),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(_reasons(tmp_path)) == ["condition", "range"]
    assert len([*tmp_path.glob("*.ctrace")]) == 2
    assert done.stderr.count("\nWrote job.") == 2


def test_run_with_triggers_says_that_none_came(tmp_path):
    done = _run(tmp_path, "hog()\nraise SystemExit(5)", "run", "--keep", "10min")
    assert done.returncode == 5
    assert "Nothing was written: no trigger came in " in done.stderr


@pytest.mark.parametrize(
    ("text", "metric", "includes", "share", "size"),
    [
        ("allocated > 90%", Metric.ALLOCATED, False, 0.9, None),
        (" reserved>=1.5GiB ", Metric.RESERVED, True, 0.0, 3 << 29),
        ("allocated>4096B", Metric.ALLOCATED, False, 0.0, 4096),
    ],
)
def test_condition_is_read(text, metric, includes, share, size):
    found = TriggerCondition.parse(text)
    assert (found.metric, found.includes, found.share, found.size) == (metric, includes, share, size)


@pytest.mark.parametrize(
    "text", ["", "allocated", "allocated < 5%", "free > 5%", "allocated > 5", "allocated > x%", "a:b"]
)
def test_condition_that_makes_no_sense_is_refused(text):
    with pytest.raises(UsageError, match="no condition"):
        TriggerCondition.parse(text)


def test_share_of_more_than_all_memory_is_refused():
    with pytest.raises(UsageError, match="at most 100%"):
        TriggerCondition.parse("allocated > 300%")


@pytest.mark.parametrize(
    ("wanted", "names", "began", "ended"),
    [
        ("step:2-3", ["step"] * 5, 1, 2),
        ("step:2", ["step", "other", "step", "step 9"], 2, 2),
        ("step:10-11", [f"step {n}" for n in range(9, 13)], 1, 2),
        ("ProfilerStep:1-2", [f"ProfilerStep#{n}" for n in range(4)], 1, 2),
        ("step:0-1", ["step_0", "step_1", "step_2"], 0, 1),
        ("step:15-25", ["step 10", "step 20", "step 30"], 1, 2),  # none is the 25th
        ("step:1-2", ["stepping 1", "step 1b", "a step 1"], None, None),
        ("step:7-9", ["step 7", "step 8"], 0, None),
    ],
)
def test_ranges_are_counted_or_have_the_numbers_in_their_names(wanted, names, began, ended):
    said, seen = {"began": None, "ended": None}, []
    watch = Watch(
        None,
        RangeOf.parse(wanted),
        total_of=lambda device: None,
        met=lambda reason, text: said.update(ended=len(seen) - 1),
        began=lambda: said.update(began=len(seen) - 1),
    )
    for name in names:
        seen.append(name)
        for kind in (Kind.RANGE_PUSH, Kind.RANGE_POP):
            watch(Event(0, kind, -1, 0, 1, 0, 0, 0, name if kind == Kind.RANGE_PUSH else "", 0, 0, 0, 0))
    assert {"began": began, "ended": ended} == said
    assert watch.is_inside == (began is not None and ended is None)


def test_program_that_ends_inside_of_the_ranges_leaves_what_there_is(tmp_path):
    work = "for n in range(3):\n    with ct.range(f'step {n}'): hog(1 << 20)\n"
    done = _run(tmp_path, work, "run", "--range", "step:1-9")
    assert (0, ["range"]) == (done.returncode, _reasons(tmp_path)), done.stderr
    assert "step:1-9, of which the last did not end" in done.stderr


@pytest.mark.parametrize(("shown", "total"), [(0, 80), (1, 10), (2, 20), (3, None)])
def test_the_memory_of_a_gpu_is_that_of_the_card_or_slice_that_cuda_shows(monkeypatch, shown, total):
    """The environment decides which card has CUDA's number 0, and whether that is a slice of one."""
    uuids = [bytes([0xB0] * 16), bytes([0xA0] * 16), bytes([0xC0] * 16)]  # by CUDA's numbers

    def uuid_of(buffer: Any, device: int) -> int:
        if device >= len(uuids):
            return 101  # CUDA_ERROR_INVALID_DEVICE
        buffer.raw = uuids[device]
        return 0

    error = type("NVMLError", (Exception,), {})
    totals = {f"{kind}-{UUID(bytes=bytes([byte] * 16))}": size for kind, byte, size in CARDS}

    def by_uuid(name: str) -> str:
        if name not in totals:
            raise error("not found")
        return name

    library = SimpleNamespace(
        NVMLError=error,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetMemoryInfo=lambda name: SimpleNamespace(total=totals[name]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(_driver, "loaded", lambda name: SimpleNamespace(cuDeviceGetUuid_v2=uuid_of))
    monkeypatch.setattr(_driver, "_choice", None)
    assert total == armed._total_memory(shown)


@pytest.mark.parametrize(("when", "times"), [("allocated > 50%", 1), ("allocated > 1GiB", 0)])
def test_a_share_of_memory_whose_size_is_not_known_is_no_condition_without_a_word(
    tmp_path, monkeypatch, capsys, when, times
):
    monkeypatch.setattr(armed, "_total_memory", lambda device: None)
    options = armed.ArmOptions(directory=tmp_path, when=when, on_signal=False, on_oom=False)
    with armed.Armed(options) as own:
        for address in (512, 1024):
            own.watch(Event(0, Kind.BLOCK_ALLOC, 0, 0, 1, 0, 0, 0, "", address, 512, 500, 0))
    assert times == capsys.readouterr().err.count("never becomes true: how much memory device 0 has is not known")


@pytest.mark.parametrize(
    ("name", "said"), [("batch 1", "the program had 'batch 1'"), ("step 3", "the last was number 3")]
)
def test_program_whose_ranges_do_not_come_is_told_what_it_had(tmp_path, name, said):
    done = _run(tmp_path, f"with ct.range('{name}'): hog()\n", "run", "--range", "step:7-9")
    assert f"No range of --range step:7-9 came: {said}" in done.stderr


@pytest.mark.parametrize("text", ["step", "step:3-2", ":1", "step:x", "step:-1"])
def test_ranges_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="names no ranges"):
        RangeOf.parse(text)


@pytest.mark.parametrize(
    "given",
    [{"when": "x"}, {"every": "x"}, {"keep": "x"}, {"ranges": "x"}, {"most_files": 0}, {"nonsense": 1}],
)
def test_options_that_make_no_sense_are_refused(given):
    from cudatool.recording.armed import arm

    with pytest.raises(UsageError):
        arm(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep": 5}, "keep must be a text, such as '64MiB', not 5"),
        ({"when": 90}, "when must be a text"),
        ({"every": 5}, "every must be a text"),
        ({"ranges": 3}, "ranges must be a text"),
        ({"name": 3}, "name must be a text"),
        ({"directory": 3}, "directory must be a text"),
        ({"on_oom": "no"}, "on_oom must be True or False, such as True, not 'no'"),
        ({"most_files": "8"}, "most_files must be a whole number, such as 8, not '8'"),
        ({"history_share": "1%"}, "history_share must be a number"),
        ({"kepp": "5min"}, "there is no option to arm a process 'kepp'; did you mean 'keep'?"),
    ],
)
def test_option_of_another_type_is_named_with_what_it_must_be(given, words):
    from cudatool.recording.armed import arm

    with pytest.raises(UsageError, match=f"^{re.escape(words)}"):
        arm(**given)


def test_limit_is_exact_and_met_once_a_minute_until_it_was_not():
    met = []
    watch = Watch(
        TriggerCondition.parse("allocated > 50%"),
        None,
        total_of=lambda device: 100,
        met=lambda reason, text: met.append((reason, text)),
        began=lambda: None,
    )

    def event(kind, size, second=0.0):
        watch(Event(int(second * 10**9), kind, 0, 0, 1, 1, 0, 0, "", 1 << 40, size, size, 0))

    event(Kind.BLOCK_ALLOC, 50)
    assert met == []
    event(Kind.BLOCK_ALLOC, 1)
    event(Kind.BLOCK_ALLOC, 1)
    assert met == [(Reason.CONDITION, "allocated > 50%")]
    event(Kind.BLOCK_FREE_COMPLETED, 2)
    event(Kind.BLOCK_ALLOC, 1, 59.9)
    assert len(met) == 1
    event(Kind.BLOCK_ALLOC, 1, 60.1)  # still true
    assert len(met) == 1
    event(Kind.BLOCK_FREE_COMPLETED, 2, 60.2)
    event(Kind.BLOCK_ALLOC, 1, 60.3)
    assert len(met) == 2


def _watched(limit: str) -> tuple[Watch, list[Reason]]:
    met: list[Reason] = []
    condition = TriggerCondition.parse(f"allocated > {limit}")
    watch = Watch(
        condition, None, total_of=lambda device: 0, met=lambda reason, _: met.append(reason), began=lambda: None
    )
    return watch, met


def _event(kind: Kind, address: int = 0, size: int = 0, thread: int = 1) -> Event:
    return Event(0, kind, 0, 0, thread, 0, 0, 0, "", address, size, 0, 0)


def test_allocated_counts_the_blocks_of_a_librarys_chunk_and_not_the_chunk():
    watch, met = _watched("1000B")
    for event in (
        _event(Kind.MEM_ALLOC, 0x10000, 4096),
        _event(Kind.DEVICE_USE),
        _event(Kind.MEM_ALLOC, 0x90000, 100, thread=2),  # another thread's, of no library
        _event(Kind.POOL_ALLOC, 0x10000, 512),
        _event(Kind.KERNEL_LAUNCH, thread=2),
        _event(Kind.POOL_ALLOC, 0x10200, 512),
        _event(Kind.POOL_FREE, 0x10000, 512),
    ):
        assert event.kind is not Kind.POOL_FREE or met == [Reason.CONDITION]  # 100 + 512 + 512
        assert event.kind is Kind.POOL_FREE or met == []
        watch(event)
    assert 612 == watch._levels[0]
    watch(_event(Kind.MEM_FREE, 0x10000, 4096))  # and its block with it
    watch(_event(Kind.MEM_FREE, 0x90000, 100))
    watch(_event(Kind.MEM_FREE, 0x70000, 100))  # from before the recording
    assert 0 == watch._levels[0]


@pytest.mark.parametrize("shown_by", ["its thread's next event", "the end"])
def test_what_a_library_takes_from_the_driver_counts_whole_without_blocks(shown_by):
    watch, met = _watched("1000B")
    watch(_event(Kind.MEM_ALLOC, 0x10000, 4096))
    watch(_event(Kind.KERNEL_LAUNCH, thread=2))
    assert met == []
    if shown_by == "the end":
        watch.settle()
    else:
        watch(_event(Kind.KERNEL_LAUNCH))
    assert met == [Reason.CONDITION]


def test_example_of_the_page_prints_what_the_page_shows(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "triggers.md").read_text()
    line, first, second, third = page.partition("```console\n")[2].partition("```")[0].splitlines()
    words = shlex.split(line)[2:]
    done = _run(tmp_path, "for _ in range(9): hog()", *words[:-1])
    assert done.returncode == 0, done.stderr
    shown = re.sub(r"\d+ events|job\.\d+|\([\d.]+ KiB\)", "", "\n".join((first, second, third)))
    assert re.sub(r"\d+ events|job\.\d+|\([\d.]+ KiB\)", "", done.stderr.strip()) == shown
