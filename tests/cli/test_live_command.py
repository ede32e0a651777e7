"""`cudatool live`: a recording while it runs, as text, as JSON and as a view."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from textual.pilot import Pilot

from cudatool.cli._live_text import as_json, as_lines, rate
from cudatool.cli._live_view import LiveView, curve_lines, is_due
from cudatool.cli._schemas import schema_of_command
from cudatool.cli._watched import Watched, trace_of_process
from cudatool.errors import UsageError
from cudatool.trace import Recorder, hooks, stacks
from cudatool.trace.events import Kind, UseFlag
from cudatool.trace.model import Ending, Frame

_PROGRAM = """
import sys
import cudatool as ct
kept = []
def hold(): kept.append(ct.empty(1 << 20, "u1"))
for _ in range(3):
    hold()
x = ct.ones(1000, "f4"); (x + x).sum().get()
print("the program's own words", flush=True)
"""
_WAITS = "print('ready', flush=True); sys.stdin.readline()\n"


@pytest.fixture(autouse=True)
def fresh_hooks() -> Iterator[None]:
    hooks.reset()
    yield
    hooks.reset()


@pytest.fixture
def trace(run_warm, tmp_path) -> Path:
    (tmp_path / "job.py").write_text(_PROGRAM)
    done = run_warm("run", "--device", "sim:memory=64MiB", "-o", "job.ctrace", "job.py")
    assert done.returncode == 0, done.stderr
    return tmp_path / "job.ctrace"


@contextmanager
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A recorded program that waits for a line."""
    (tmp_path / "job.py").write_text(_PROGRAM + _WAITS)
    command = [sys.executable, "-m", "cudatool", "run", "--device", "sim:memory=64MiB", "-o", "job.ctrace", "job.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            pass
        try:
            yield process
        finally:
            process.kill()


def stack_of(line: int) -> int:
    return stacks.intern((Frame("/home/me/train.py", "step", line), Frame("/home/me/train.py", "main", 1)))


def hold(address: int, size: int, line: int) -> None:
    """Emit an allocation of a call site."""
    hooks.emit(Kind.BLOCK_ALLOC, device=0, address=address, size=size, stack=stack_of(line))


def test_a_recording_that_has_ended_has_no_events_to_come(run_warm, run_here, tmp_path):
    (tmp_path / "none.py").write_text("")
    run_warm("run", "-o", "none.ctrace", "none.py")
    assert "No events." in run_here("live", "--plain", "none.ctrace").stdout.splitlines()


def test_a_recording_that_has_ended_is_described_once(trace, run_here):
    done = run_here("live", "--plain", trace)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"After 0:00:\d\d: [\d,]+ events, [\d.,]+ a second; the recording ended\.", lines[0])
    assert re.fullmatch(
        r"Device 0: 3(\.\d+)? MiB allocated \(peak .*\), .* reserved \(peak .*\), of 64 MiB\.", lines[1]
    )
    assert "1. job.py:5 (hold): 3 MiB in 3 blocks" in lines
    assert re.search(r"add<.*>: [\d.]+ a second, 1 launch, .* on the device \(simulated\)", done.stdout)
    assert re.search(r"default stream: [\d.]+ a second, \d+ operations", done.stdout)
    assert "the recording ended: job.ctrace" in done.stderr
    assert "Next: cudatool snapshot job.ctrace" in done.stderr


def test_json_is_a_line_that_its_schema_describes(trace, run_here):
    done = run_here("live", "--json", trace)
    (line,) = done.stdout.splitlines()
    picture = json.loads(line)
    Draft202012Validator(schema_of_command("live")).validate(picture)
    assert "closed" == picture["ending"]
    assert 3 << 20 == picture["sites"][0]["bytes"]
    assert {"schema", "source", "devices", "sites", "kernels", "streams"} <= picture.keys()


def test_the_newest_trace_is_watched_where_none_is_named(trace, run_here):
    assert "the recording ended: job.ctrace" in run_here("live", "--plain").stderr


def test_a_program_is_started_recorded_and_watched(run_warm, tmp_path):
    (tmp_path / "job.py").write_text(_PROGRAM + "sys.exit(7)")
    (tmp_path / "rich.py").write_text("1 / 0  # a program of the user's own")
    done = run_warm("live", "--plain", "--every", "0.2", "--device", "sim", "-o", "out.ctrace", "job.py", "an argument")
    assert done.returncode == 7
    assert "job.py:5 (hold): 3 MiB in 3 blocks" in done.stdout
    assert "the program's own words" not in done.stdout + done.stderr
    assert "the program's own words" in (tmp_path / "out.log").read_text()
    assert "the recording ended: out.ctrace" in done.stderr
    again = run_warm("live", "--plain", "--device", "sim", "-o", "out.ctrace", "job.py")
    assert again.returncode == 2
    assert "out.log exists; add -f" in again.stderr


def test_the_status_of_a_program_that_a_signal_ended_is_the_shells(run_warm, tmp_path):
    (tmp_path / "job.py").write_text(_PROGRAM + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    done = run_warm("live", "--plain", "--every", "0.2", "--device", "sim", "-o", "out.ctrace", "job.py", "an argument")
    assert 128 + 9 == done.returncode, done.stderr


def test_a_program_that_is_never_recorded_is_said_with_its_last_words(run_warm):
    done = run_warm("live", "--plain", "--device", "sim:memory=nonsense", "-c", "pass")
    assert done.returncode == 2
    assert "the program ended before it was recorded" in done.stderr
    assert "nonsense" in done.stderr


def test_the_trace_of_a_process_is_found(tmp_path, run_here):
    with running(tmp_path) as process:
        assert str(tmp_path / "job.ctrace") == trace_of_process(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = run_here("live", "--plain", "job.ctrace")
        assert "the program was killed" in done.stdout
        assert "job.py:5 (hold): 3 MiB" in done.stdout


def test_a_view_that_is_left_names_the_trace_of_what_goes_on(tmp_path):
    with running(tmp_path) as process:
        command = [sys.executable, "-m", "cudatool", "live", "--plain", "--every", "60", str(process.pid)]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as view:
            assert view.stdout is not None
            while "Streams" not in view.stdout.readline():
                pass
            view.send_signal(signal.SIGINT)
            _, said = view.communicate()
        assert 130 == view.returncode
        assert "the recording goes on: job.ctrace" in said
        assert process.poll() is None


def test_processes_that_do_not_record_are_refused(tmp_path):
    with pytest.raises(UsageError, match="it does not record"):
        trace_of_process(os.getpid())
    with pytest.raises(UsageError, match="no process 99999999"):
        trace_of_process(99_999_999)


def test_what_is_no_recording_is_refused(run_here, tmp_path):
    (tmp_path / "text.ctrace").write_text("x" * 100)
    for words, said in (
        (["text.ctrace"], "is not a cudatool trace"),
        (["missing.ctrace"], "cannot be read"),
        (["missing.py"], "does not exist"),
        (["99999999"], "there is no process"),
    ):
        done = run_here("live", "--plain", *words)
        assert done.returncode == 2
        assert said in done.stderr, words


def test_a_program_from_standard_input_is_refused(run_command):
    done = run_command("live", "--plain", "-", input="print(1)")
    assert (2, True) == (done.returncode, "gives a program no input" in done.stderr)


@pytest.mark.parametrize("what", [None, "4242"])
def test_options_after_what_is_watched_are_no_arguments_of_a_program(trace, run_here, tmp_path, what):
    done = run_here("live", what or trace, "--json")
    assert (2, "") == (done.returncode, done.stdout)
    assert f"cudatool live --json {what or trace}" in done.stderr and not list(tmp_path.glob("*.log"))


def test_output_options_need_a_program(trace, run_here):
    assert "go with a program" in run_here("live", "--plain", "-o", "x.ctrace", trace).stderr


def test_without_textual_there_is_text_and_a_line_that_says_so(trace, tmp_path):
    program = f"""
import sys
sys.modules["textual"] = None
from cudatool.cli import main, live
assert live.LiveView is None
sys.argv = ["cudatool", "live", *sys.argv[1:], {str(trace)!r}]
class Terminal:
    def __init__(self, stream): self._stream = stream
    def isatty(self): return True
    def __getattr__(self, name): return getattr(self._stream, name)
sys.stdin, sys.stdout, sys.stderr = map(Terminal, (sys.stdin, sys.stdout, sys.stderr))
main()
"""
    for words, status, said in ((["--plain"], 0, "3 MiB in 3 blocks"), ([], 2, "pip install 'cudatool[live]'")):
        done = subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True)
        assert status == done.returncode, done.stderr
        assert said in done.stdout + done.stderr


def test_a_recording_that_replaces_another_is_watched_from_its_beginning(tmp_path):
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        hold(64, 1 << 20, 5)
    watched = Watched(path)
    watched.catch_up()
    assert 1 << 20 == watched.picture().sites[0].bytes
    with Recorder(path, header={}, force=True):
        hold(64, 3, 9)
    again = Watched(path)
    again.catch_up()
    assert (again.path, 0) == (watched.path, watched.replaced)
    watched.close()
    again.close()


def test_a_recording_that_replaces_one_that_is_watched_is_followed(tmp_path):
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        hold(64, 1 << 20, 5)
        watched = Watched(path)
        watched.catch_up()
    with Recorder(path, header={}, force=True):
        hold(64, 3, 9)
        watched.catch_up()
        assert 1 == watched.replaced
        assert [("train.py:9 (step)", 3)] == [(site.label, site.bytes) for site in watched.picture().sites]
        assert Ending.GROWING is watched.ending
    watched.catch_up()
    assert Ending.CLOSED is watched.ending
    watched.close()


def test_names_from_a_file_cannot_command_a_terminal(tmp_path):
    path = tmp_path / "t.ctrace"
    with Recorder(path, header={}):
        hooks.emit(Kind.KERNEL_LAUNCH, device=0, name="evil\x1b[2J\n::error::x")
    watched = Watched(path)
    watched.catch_up()
    text = "\n".join(as_lines(watched, watched.picture()))
    assert "\x1b" not in text
    assert "::error" not in text
    watched.close()


@pytest.mark.parametrize(("per_second", "text"), [(0.0, "0"), (0.44, "0.4"), (9.96, "10"), (1234.5, "1,234")])
def test_rates_are_short(per_second, text):
    assert text == rate(per_second)


def test_the_curve_is_drawn_to_its_height():
    assert ["·▁█", "███"] == curve_lines([8, 9, 16], [16, 9, 16], 2)
    assert ["  ", "  "] == curve_lines([0, 0], [0, 0], 2)


def test_drawing_keeps_to_its_share_of_a_core():
    assert is_due(1.0, 0.08)
    assert not is_due(1.0, 0.081)
    assert is_due(2.0, 0.16)
    assert not is_due(4.9, 4.9)
    assert is_due(5.0, 5.0)


# --- the view ---


def drive(path: Path, steps: Callable[[LiveView, object], Awaitable[None]]) -> LiveView:
    """Run the view without a terminal, 80 x 24, and do some steps in it."""
    watched = Watched(path)
    view = LiveView(watched)

    async def drive_it() -> None:
        async with view.run_test(size=(80, 24)) as pilot:
            await until_shown("Quit", view, pilot)
            await steps(view, pilot)

    try:
        asyncio.run(drive_it())
    finally:
        watched.close()
    return view


def shown(view: LiveView) -> str:
    """Return the screen's text."""
    return "\n".join("".join(segment.text for segment in line) for line in view.screen._compositor.render_strips())


async def until_shown(text: str, view: LiveView, pilot: Pilot[None]) -> None:
    """Wait for what a busy machine draws later."""
    ends = time.monotonic() + 20
    while text not in shown(view) and time.monotonic() < ends:
        await pilot.pause(0.02)
    assert text in shown(view)


def recording(path: Path) -> Recorder:
    """A recording with two call sites and two kernels, that goes on."""
    recorder = Recorder(path, header={"device": "a test", "total_memory": [1 << 30]}, force=True)
    recorder.__enter__()
    hooks.emit(Kind.SEGMENT_ALLOC, device=0, address=1 << 30, size=8 << 20)
    hold(1 << 30, 3 << 20, 5)
    for number in range(4):
        hold((1 << 31) + number * 512, 512, 9)
    for name in ("scale", "scale", "add"):
        hooks.emit(Kind.KERNEL_LAUNCH, device=0, name=name, stream=1)
    return recorder


def test_the_view_shows_memory_sites_kernels_and_streams(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        text = shown(view)
        assert "t.ctrace  recording 0:00:0" in text
        assert "Device 0: 3 MiB allocated (peak 3 MiB), 8 MiB reserved (peak 8 MiB), of" in text
        assert "Call sites by live bytes (2)" in text
        assert text.index("train.py:5 (step)") < text.index("train.py:9 (step)")
        assert "█" in text
        assert "Quit" in text and "Search" in text
        assert 24 == len(text.splitlines())
        await pilot.press("2")
        await until_shown("add", view, pilot)
        text = shown(view)
        assert "Kernels by launches a second (2)" in text
        assert text.index("scale") < text.index("add")
        await pilot.press("3")
        await until_shown("stream 1", view, pilot)

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()


def test_a_view_that_is_taken_down_draws_no_more(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        view._running = False  # as textual does first
        for part in ("#head", "#rows"):
            view.screen._nodes._remove(view.query_one(part))
        view._look()

    try:
        assert drive(tmp_path / "t.ctrace", steps).failure is None
    finally:
        recorder.close()


def charged(recorder: Recorder) -> Recorder:
    """The same, where NVML has said what the driver charges."""
    hooks.emit(Kind.DEVICE_USE, device=0, size=20 << 20, address=25 << 20, aux0=1 << 30, flags=UseFlag.CONTEXT)
    return recorder


def test_the_view_shows_what_all_the_memory_is_that_the_driver_charges(tmp_path):
    recorder = charged(recording(tmp_path / "t.ctrace"))

    async def steps(view, pilot):
        await pilot.press("4")
        await until_shown("25.0 %", view, pilot)
        text = shown(view)
        assert "Memory of this process on device 0, by who holds it" in text
        rows = [line.split() for line in text.splitlines() if "%" in line]
        assert ["12", "MiB", "60.0", "%", "the", "driver,", "context"] == rows[0]
        assert ["5", "MiB", "25.0", "%", "cudatool's", "runtime,", "cached"] == rows[1]
        await pilot.press("s")  # there is one column to sort by
        await until_shown("60.0 %", view, pilot)

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()


def test_without_a_reading_the_view_says_that_there_is_no_ledger(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        await pilot.press("4")
        assert "NVML has not said what the driver charges" in shown(view)

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()


def test_text_and_json_say_what_all_the_memory_is_that_the_driver_charges(tmp_path):
    charged(recording(tmp_path / "t.ctrace")).close()
    watched = Watched(tmp_path / "t.ctrace")
    watched.catch_up()
    picture = watched.picture()
    text = as_lines(watched, picture)
    at = text.index("Memory that the driver charges, device 0:")
    assert ["1. the driver, context: 12 MiB", "2. cudatool's runtime, cached: 5 MiB"] == text[at + 1 : at + 3]
    found = json.loads(json.dumps(as_json(watched, picture)))
    Draft202012Validator(schema_of_command("live")).validate(found)
    assert {"holder": "driver", "owner": "context", "size": 12 << 20} == found["devices"][0]["ledger"][0]
    watched.close()


def test_keys_sort_search_and_mark(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        await pilot.press("s", "s")
        text = shown(view)
        assert "Call sites by blocks" in text
        assert text.index("train.py:9 (step)") < text.index("train.py:5 (step)")
        await pilot.press("slash", *"PY:9", "enter")
        text = shown(view)
        assert "(1, containing 'PY:9')" in text
        assert "train.py:5" not in text
        await pilot.press("escape")
        assert "train.py:5" in shown(view)
        await pilot.press("m", "s", "s", "s")  # to the change since the mark
        hold(1 << 33, 7 << 20, 9)
        view._look()
        await pilot.pause()
        text = shown(view)
        assert "Call sites by change since the mark" in text
        assert "marked at 0:00:0" in text
        assert "+7 MiB" in text
        assert text.index("train.py:9 (step)") < text.index("train.py:5 (step)")

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()


def test_enter_shows_the_stack_of_a_call_site_and_escape_goes_back(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        await pilot.press("down", "enter")
        await pilot.pause()
        text = shown(view)
        assert "2 KiB in 4 blocks, 4 allocations so far" in text
        assert "> step  /home/me/train.py:9" in text
        assert "> main  /home/me/train.py:1" in text
        await pilot.press("escape")
        await pilot.pause()
        assert "Call sites by live bytes" in shown(view)

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()


def test_a_pause_holds_the_picture_and_loses_nothing(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        await pilot.press("p")
        hold(1 << 33, 7 << 20, 11)
        view._look()
        await pilot.pause()
        text = shown(view)
        assert "PAUSED" in text
        assert "train.py:11" not in text
        await pilot.press("p")
        view._look()
        await pilot.pause()
        assert "train.py:11" in shown(view)

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()


def test_the_cursor_stays_with_its_row(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        await pilot.press("down")
        assert 1 == view._table.cursor_row
        hold(1 << 33, 7 << 20, 9)  # the row under the cursor becomes the first
        view._look()
        await pilot.pause()
        assert 0 == view._table.cursor_row

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()


def test_the_view_ends_with_the_recording(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")

    async def steps(view, pilot):
        recorder.close()
        view._look()
        await pilot.pause()
        assert view._exit

    view = drive(tmp_path / "t.ctrace", steps)
    assert view.failure is None
    assert Ending.CLOSED is view._watched.ending


def test_markup_in_names_is_text(tmp_path):
    recorder = recording(tmp_path / "t.ctrace")
    hooks.emit(Kind.KERNEL_LAUNCH, device=0, name="[red]k[/red]\x1b[2J", stream=1)

    async def steps(view, pilot):
        await pilot.press("2")
        assert "[red]k[/red]\\x1b[2J" in shown(view)

    try:
        drive(tmp_path / "t.ctrace", steps)
    finally:
        recorder.close()
