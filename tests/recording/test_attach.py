"""Recording a program that is running: asked through a stand-in for the debugger, and through those that there are."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cudatool import recording
from cudatool.analyze.live import LiveState
from cudatool.cli.attach import attach
from cudatool.cli.detach import detach
from cudatool.errors import CudatoolError, UsageError
from cudatool.recording import debuggers, inject, target
from cudatool.recording.inject import ask
from cudatool.recording.target import Target
from cudatool.trace import read
from cudatool.trace.follow import Follower
from cudatool.trace.model import Ending

_SETUP = """
import os, sys, threading, time
import cudatool as ct
held = ct.empty(3 << 20, "u1")
def step():
    x = ct.ones(1000, "f4")
    return float((x + x).sum().get())
step()
"""
# It runs what it reads between two statements, as Python runs what a debugger asks for.
_SERVES = """
print("ready", flush=True)
for line in sys.stdin:
    word, _, path = line.strip().partition(" ")
    if word == "run":
        exec(open(path).read().rstrip(chr(0)))
    elif word == "step":
        print(step(), flush=True)
    elif word == "grown":
        import gc, resource; gc.collect()
        files = len(os.listdir("/proc/self/fd")); threads = threading.active_count()
        maps = sum(1 for _ in open("/proc/self/maps"))
        print(files, threads, maps, len(gc.get_objects()), flush=True)
    elif word == "mains":
        print(sorted(name for name in globals() if not name.startswith("__")), flush=True)
print("over", flush=True)
"""
_LOOPS = "print('ready', flush=True)\nwhile True:\n    step(); time.sleep(0.005)\n"


class _Program:
    """A Python program in a process of its own, on the software device."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def program(text: str, **environment: str) -> Iterator[_Program]:
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDATOOL_DEVICE": "sim:memory=64MiB", **environment},
    ) as process:
        found = _Program(process)
        assert "ready" == found.hear(), process.stderr.read() if process.stderr else ""
        try:
            yield found
        finally:
            process.kill()


def _stand_in(monkeypatch, found: _Program) -> None:
    """Ask a program through its standard input instead of gdb."""
    monkeypatch.setitem(inject.METHODS, "gdb", lambda target, run, page: found.say(f"run {run}"))
    monkeypatch.setattr(Target, "free_page", lambda self: 0)
    monkeypatch.setattr(debuggers.shutil, "which", lambda name: name)


@pytest.fixture
def asked(monkeypatch) -> Iterator[_Program]:
    """A program that is asked through its standard input."""
    with program(_SETUP + _SERVES) as found:
        _stand_in(monkeypatch, found)
        yield found


def request(
    pid: int, what: str, path: Path | None = None, *, wait_s: float = 20.0, method: str = "gdb", **options: Any
) -> dict[str, Any]:
    words = {"what": what, "path": str(path), "options": options}
    return ask(Target.of(pid), words, wait_s=wait_s, method=method)


def test_a_recording_begins_with_what_is_held_and_ends_without_the_program(asked, tmp_path):
    path = tmp_path / "t.ctrace"
    assert {"code": "begun", "trace": str(path)} == request(asked.pid, "begin", path)
    asked.say("step")
    assert "2000.0" == asked.hear()
    assert Ending.GROWING is read(path).ending
    assert {"code": "ended", "trace": str(path)} == request(asked.pid, "end")
    trace = read(path)
    assert Ending.CLOSED is trace.ending
    assert trace.header["prior_bytes"] >= 3 << 20
    assert "ready" not in trace.header["argv"]
    functions = {frame.function for frame in trace.frames}
    assert "step" in functions
    asked.say("step")
    assert "2000.0" == asked.hear()


def test_the_program_gets_no_new_names_and_no_output(asked, tmp_path):
    asked.say("mains")
    before = asked.hear()
    request(asked.pid, "begin", tmp_path / "t.ctrace")
    asked.say("mains")
    assert before == asked.hear()


def test_requests_that_make_no_sense_are_refused(asked, tmp_path):
    with pytest.raises(CudatoolError, match="it is not being recorded"):
        request(asked.pid, "end")
    request(asked.pid, "begin", tmp_path / "t.ctrace")
    with pytest.raises(CudatoolError, match=r"is being recorded already to .*t\.ctrace"):
        request(asked.pid, "begin", tmp_path / "other.ctrace")
    assert not (tmp_path / "other.ctrace").exists()
    request(asked.pid, "end")
    with pytest.raises(CudatoolError, match=r"t\.ctrace exists"):
        request(asked.pid, "begin", tmp_path / "t.ctrace")
    request(asked.pid, "begin", tmp_path / "t.ctrace", force=True)


def test_a_program_that_ends_closes_its_trace(asked, tmp_path):
    request(asked.pid, "begin", tmp_path / "t.ctrace")
    assert asked.process.stdin is not None
    asked.process.stdin.close()
    assert "over" == asked.hear()
    asked.process.wait()
    assert Ending.CLOSED is read(tmp_path / "t.ctrace").ending


def test_fifty_cycles_leave_nothing(asked, tmp_path):
    figures = []
    for number in range(50):
        request(asked.pid, "begin", tmp_path / f"{number}.ctrace")
        asked.say("step")
        assert "2000.0" == asked.hear()
        request(asked.pid, "end")
        asked.say("grown")
        figures.append([int(word) for word in asked.hear().split()])
    assert all(read(tmp_path / f"{number}.ctrace").ending is Ending.CLOSED for number in (0, 49))
    files, threads, maps, objects = zip(*figures, strict=True)
    assert files[5] == files[-1]
    assert max(threads[5:]) <= 2  # the main one, and that of a request that is about to end
    assert maps[-1] <= maps[5] + 20  # stacks of threads that overlapped
    assert objects[-1] - objects[10] < 40 * 5  # less than a few for each cycle


def test_a_program_that_runs_no_python_is_asked_in_vain_and_left_alone(asked, tmp_path, monkeypatch):
    monkeypatch.setitem(inject.METHODS, "gdb", lambda target, run, page: None)  # a main thread that waits
    with pytest.raises(CudatoolError, match=r"ran no Python code for 0\.1 s.*Nothing was changed"):
        request(asked.pid, "begin", tmp_path / "t.ctrace", wait_s=0.1)
    assert not (tmp_path / "t.ctrace").exists()


def test_a_request_that_was_withdrawn_is_not_carried_out_later(asked, tmp_path, monkeypatch):
    texts = []
    monkeypatch.setitem(inject.METHODS, "gdb", lambda target, run, page: texts.append(run.read_text()))
    with pytest.raises(CudatoolError, match="Nothing was changed"):
        request(asked.pid, "begin", tmp_path / "t.ctrace", wait_s=0.1)
    late = tmp_path / "late.py"
    late.write_text(texts[0].rstrip("\0"))
    asked.say(f"run {late}")
    asked.say("step")
    assert "2000.0" == asked.hear()
    assert not (tmp_path / "t.ctrace").exists()


def test_a_withdrawn_request_leaves_python_a_file_that_does_nothing(asked, monkeypatch):
    """Python complains on the program's stderr if the file that it was given is gone."""
    given = []
    monkeypatch.setattr(sys, "remote_exec", lambda pid, path: given.append((pid, path)), raising=False)
    with pytest.raises(CudatoolError, match="Nothing was changed"):
        ask(Target.of(asked.pid), {"what": "end"}, wait_s=0.1, method="remote-exec")
    (_, first), (pid, last) = given
    assert asked.pid == pid
    assert not os.path.exists(first)
    assert [] == ast.parse(Path(last).read_text()).body


def test_a_program_without_cudatool_is_refused(tmp_path, monkeypatch):
    text = "import sys\nsys.modules['cudatool.recording'] = None\n" + _SERVES
    with program(text) as found:
        _stand_in(monkeypatch, found)
        with pytest.raises(CudatoolError, match=r"cannot import cudatool .*; install it for .*python"):
            request(found.pid, "begin", tmp_path / "t.ctrace")


def test_processes_that_cannot_be_asked_are_refused_in_one_line(monkeypatch):
    with pytest.raises(UsageError, match="no process 99999999"):
        Target.of(99_999_999)
    with pytest.raises(UsageError, match="the command itself"):
        Target.of(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            with pytest.raises(UsageError, match="is not a Python program"):
                Target.of(other.pid)
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
            with pytest.raises(UsageError, match="another user's"):
                Target.of(other.pid)
        finally:
            other.kill()


def test_a_process_that_ends_meanwhile_is_said_to_have_ended() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = Target.of(child.pid)
        child.communicate(b"\n")
        with pytest.raises(CudatoolError, match=f"process {child.pid} has ended"):
            found.functions()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its number is still its own
        with pytest.raises(UsageError, match=f"process {child.pid} has ended"):
            Target.of(child.pid)


def test_what_is_missing_is_said(asked, monkeypatch):
    target = Target.of(asked.pid)
    assert sys.version_info[:2] == target.version
    assert "code" == target.name
    monkeypatch.setattr(debuggers.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="gdb is not installed"):
        ask(target, {"what": "end"}, wait_s=1, method="gdb")
    with pytest.raises(UsageError, match=r"lldb is not installed.*apt-get install lldb"):
        ask(target, {"what": "end"}, wait_s=1, method="lldb")
    if sys.version_info < (3, 14):
        with pytest.raises(UsageError, match="neither gdb nor lldb is installed"):
            ask(target, {"what": "end"}, wait_s=1)
    if sys.version_info < (3, 14):
        with pytest.raises(UsageError, match=r"remote-exec needs Python 3\.14"):
            ask(target, {"what": "end"}, wait_s=1, method="remote-exec")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "-u", "/x/train.py", "-m"], "train"),
        (["python", "-m", "pkg.train"], "train"),
        (["python", "-c", "pass"], "code"),
        (["python"], "python"),
    ],
)
def test_a_program_is_called_by_its_name(words, name):
    assert name == target._name(words)


# --- the commands ---


def test_the_commands_say_where_the_trace_is_and_what_it_begins_with(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = CliRunner().invoke(attach, [str(asked.pid), "--method", "gdb"], catch_exceptions=False)
    assert 0 == begun.exit_code
    assert f"Recording process {asked.pid} to code.{asked.pid}.ctrace\n" in begun.stderr
    assert "The trace begins with 3 MiB that the program held already\n" in begun.stderr
    assert f"cudatool detach {asked.pid}" in begun.stderr
    assert "" == begun.stdout
    with pytest.raises(CudatoolError, match="it is being recorded already"):
        CliRunner().invoke(attach, [str(asked.pid), "--method", "gdb"], catch_exceptions=False)
    ended = CliRunner().invoke(detach, [str(asked.pid), "--method", "gdb"], catch_exceptions=False)
    assert 0 == ended.exit_code
    assert f"Wrote code.{asked.pid}.ctrace (" in ended.stderr


# --- a recording that begins while other threads allocate ---


def test_no_free_is_lost_between_what_lives_and_the_first_event(tmp_path):
    """The other thread frees at the worst moment: it has to wait until its free is recorded."""
    text = (
        _SETUP
        + f"""
from cudatool import recording
Recorder, others = recording.Recorder, []
def make(*words, **options):
    def free():
        global held
        held = None
    other = threading.Thread(target=free); others.append(other)
    other.start(); other.join(0.5)
    return Recorder(*words, **options)
recording.Recorder = make
with recording.record({str(tmp_path / "t.ctrace")!r}):
    others[0].join()
    step()
print("ready", flush=True)
"""
    )
    with program(text):
        pass
    state = LiveState()
    with Follower(tmp_path / "t.ctrace") as follower:
        while len(records := follower.read()):
            state.fold(records)
        (device,) = state.picture(follower).devices
    assert device.peak_allocated >= 3 << 20
    assert device.allocated < 3 << 20


def test_nothing_is_held_when_a_recording_cannot_begin(tmp_path):
    (tmp_path / "t.ctrace").write_text("something else")
    text = (
        _SETUP
        + f"""
from cudatool import errors, recording
try:
    with recording.record({str(tmp_path / "t.ctrace")!r}): pass
except errors.OutputError:
    other = threading.Thread(target=step); other.start(); other.join(30)
    print("ready" if not other.is_alive() else "stuck", flush=True)
"""
    )
    with program(text):
        pass


# --- with debuggers ---


def test_the_functions_that_a_debugger_calls_are_found_without_it():
    with subprocess.Popen([sys.executable, "-c", _TELLS], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            expected = [int(word) for word in other.stdout.readline().split()]
            found = Target.of(other.pid).functions()
        finally:
            other.kill()
    assert expected == [found.mmap, found.add_pending_call, found.run_string]


_TELLS = """
import ctypes, time
here = ctypes.CDLL(None)
names = "mmap", "Py_AddPendingCall", "PyRun_SimpleString"
print(*(ctypes.cast(getattr(here, name), ctypes.c_void_p).value for name in names), flush=True)
time.sleep(60)
"""


def test_a_file_that_was_replaced_is_named_as_a_cause(monkeypatch):
    monkeypatch.setattr(target, "_exported", lambda path, start, names: {})
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        try:
            with pytest.raises(CudatoolError, match=r"no function mmap .* was replaced since the program started"):
                Target(other.pid, os.getuid(), None, "code").functions()
        finally:
            other.kill()


_TRIED = {
    "gdb": [
        *("gdb", "-batch", "-nx", "-p", "{pid}", "-ex", "set $called = 0"),
        *("-ex", "set $called = ((int (*)(void)) getpid)()", "-ex", "quit $called != {pid}"),
    ],
    "lldb": ["lldb", "--no-lldbinit", "--batch", "-o", "process attach -p {pid}", "-o", "detach"],
}


@functools.cache
def _works(debugger: str) -> bool:
    if shutil.which(debugger) is None:
        return False
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        try:
            words = [word.format(pid=other.pid) for word in _TRIED[debugger]]
            done = subprocess.run(words, capture_output=True, check=False)
        finally:
            other.kill()
    return done.returncode == 0


@pytest.fixture(params=list(_TRIED))
def debugger(request: pytest.FixtureRequest) -> str:
    if not _works(request.param):
        pytest.skip(f"no {request.param} that may stop a process, and can call a function in it")
    return str(request.param)


def test_a_debugger_asks_a_program_that_computes(debugger, tmp_path):
    path = tmp_path / "t.ctrace"
    with program(_SETUP + _LOOPS) as found:
        for _ in range(3):
            request(found.pid, "begin", path, method=debugger, force=True)
            with Follower(path) as follower:
                while follower.events < 300:
                    follower.read()
                    time.sleep(0.01)
            assert {"code": "ended", "trace": str(path)} == request(found.pid, "end", method=debugger)
            assert Ending.CLOSED is read(path).ending
        assert found.process.poll() is None


def test_a_debugger_finds_a_program_that_waits_and_leaves_it_alone(debugger, tmp_path):
    # It is in the wait when it says that it is ready.
    with program(_SETUP + "os.system('echo ready; read line'); print(step(), flush=True)\n") as found:
        with pytest.raises(CudatoolError, match="Nothing was changed"):
            request(found.pid, "begin", tmp_path / "t.ctrace", wait_s=0.5, method=debugger)
        found.say("")
        assert "2000.0" == found.hear()
    assert not (tmp_path / "t.ctrace").exists()
    assert not recording.is_observing()


@pytest.mark.parametrize(
    "where",
    ["time.sleep(0.02)", "os.read(r, 1)", "lock.acquire(timeout=0.02)", "select.select([r], [], [], 0.02)"],
)
def test_a_debugger_does_not_disturb_a_call_of_the_system(debugger, where):
    """Stopped in a call of the system, the program carries it out again: it gets neither an error nor a wrong value."""
    text = f"""
import os, select, signal, sys, threading, time
r, w = os.pipe()
threading.Thread(target=lambda: [(os.write(w, b"x"), time.sleep(0.03)) for _ in range(2000)], daemon=True).start()
lock = threading.Lock(); lock.acquire()
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(7)), daemon=True).start()
while True:
    found = {where}
    assert found in (None, False, b"x") or isinstance(found, tuple), found
"""
    with program(text) as found:
        with pytest.raises(CudatoolError, match="it is not being recorded"):
            request(found.pid, "end", method=debugger)
        assert found.process.poll() is None
        found.say("")
        assert 7 == found.process.wait(20)


def _debugger_that_fails(folder: Path, name: str, says: str) -> None:
    """Put a program there that says this, notes what it was given, and fails."""
    program = f"import sys; print({says!r}); open(__file__ + '.ran', 'a').write(' '.join(sys.argv)); sys.exit(1)"
    (folder / name).write_text(f"#!{sys.executable}\n{program}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("version", "registers", "is_fit"), [(13, "amx_tile", False), (14, "amx_tile", True), (13, "avx", True)]
)
def test_gdb_stops_no_program_whose_registers_it_cannot_write_back(tmp_path, monkeypatch, version, registers, is_fit):
    _debugger_that_fails(tmp_path, "gdb", f"GNU gdb (Debian {version}.1-3) {version}.1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *how: registers if str(path) == "/proc/cpuinfo" else read(path, *how)
    )
    debuggers.knows_processor.cache_clear()
    try:
        with program(_SETUP + _LOOPS) as found, pytest.raises(CudatoolError) as raised:
            request(found.pid, "end", method="gdb")
    finally:
        debuggers.knows_processor.cache_clear()
    ran = (tmp_path / "gdb.ran").read_text() if (tmp_path / "gdb.ran").exists() else ""
    assert (" -p " in ran) == is_fit
    assert ("install gdb 14" in str(raised.value)) != is_fit


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python is asked without a debugger")
def test_lldb_is_used_where_gdb_does_not_know_the_processor(tmp_path, monkeypatch):
    _debugger_that_fails(tmp_path, "lldb", "lldb version 18")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(inject, "knows_processor", lambda name: name == "lldb")
    with program(_SETUP + _LOOPS) as found, pytest.raises(UsageError, match="lldb cannot stop"):
        request(found.pid, "end", method="auto")


def test_cuda_gdb_is_used_if_it_is_named_and_finds_no_library(tmp_path, monkeypatch):
    """cuda-gdb takes the GPU as soon as it finds the driver's symbols, and reads them whatever `auto-solib-add` says."""
    if not _works("gdb"):
        pytest.skip("no gdb that may stop a process, and can call a function in it")
    log, stand_in = tmp_path / "log", tmp_path / "cuda-gdb"
    reads_it = '-ex "sharedlibrary libc" -ex "info sharedlibrary"'
    stand_in.write_text(f'#!/bin/sh\nexec {shutil.which("gdb")} {reads_it} "$@" > {log}\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if sys.version_info < (3, 14):
        with pytest.raises(UsageError, match=r"neither gdb nor lldb is installed.*--method cuda-gdb"):
            ask(Target(1, 0, None, "code"), {"what": "end"}, wait_s=1)
    with program(_SETUP + _LOOPS) as found, pytest.raises(CudatoolError, match="it is not being recorded"):
        request(found.pid, "end", method="cuda-gdb")
    rows = [line.split() for line in log.read_text().splitlines() if "/libc.so" in line or "/ld-musl" in line]
    assert ["No"] == [row[0] for row in rows]
