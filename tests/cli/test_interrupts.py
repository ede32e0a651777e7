"""Ctrl-C and other signals in a program that is inside of the driver: the program gets them, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm_process import run_python

ENVIRONMENT = {**os.environ, "CUDATOOL_DEVICE": "sim", "PYTHONUNBUFFERED": "1"}
CORE = """
from cuda.core import Device, LegacyPinnedMemoryResource
device = Device()
device.set_current()
stream = device.create_stream()
staging = LegacyPinnedMemoryResource().allocate(4096)
print("begins")
while True:
    buffer = device.memory_resource.allocate(4096, stream=stream)
    buffer.copy_from(staging, stream=stream)
    stream.record().sync()
    buffer.copy_to(staging, stream=stream)
    stream.sync()
    buffer.close()
"""
OURS = """
import cudatool as ct
x = ct.zeros(1024)
print("begins")
while True:
    (x + 1).get()
    with ct.stream(ct.Stream()):
        ct.empty(3000).fill_(1.0)
    ct.synchronize()
"""
HANDLERS = """
import signal
import cudatool as ct
from cuda.core import Device
device = Device()
device.set_current()
stream = device.create_stream()
calls, running = [], []

def again(wanted):
    if wanted and len(calls) < 25:
        signal.setitimer(signal.ITIMER_REAL, 0.003)

def allocate(number, frame):
    # No steady interval: on a busy machine a handler takes longer than that, and handlers would pile up.
    running.append(number)
    again(number and len(running) < 3)
    buffer = device.memory_resource.allocate(512, stream=stream)
    stream.sync()
    buffer.close()
    ct.zeros(100).get()
    running.pop()
    calls.append(number)
    again(number)

class Stop(Exception):
    pass

def stop(number, frame):
    raise Stop

assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.signal(signal.SIGALRM, allocate) == signal.SIG_DFL
assert signal.getsignal(signal.SIGALRM) is allocate
allocate(0, None)
(ct.ones(100) + 1).get()
again(True)
while len(calls) < 25:
    device.memory_resource.allocate(4096, stream=stream).close()
    stream.record().sync()
    (ct.ones(100) + 1).get()
signal.setitimer(signal.ITIMER_REAL, 0)
assert signal.signal(signal.SIGALRM, stop) is allocate
stopped = 0
for moment in range(25):
    try:  # a busy machine may be stopped before the loop
        signal.setitimer(signal.ITIMER_REAL, 0.0005 * (1 + moment % 7))
        while True:
            device.memory_resource.allocate(4096, stream=stream).close()
            stream.sync()
    except Stop:
        stopped += 1
device.memory_resource.allocate(4096, stream=stream).close()
stream.sync()
print("stopped", stopped)
"""
# Most of the time is spent in a function of Python that C calls.
COMPILER = """
import signal
import cudatool as ct
from cuda.bindings import nvrtc

class Stop(Exception):
    pass

came = []
def stop(number, frame):
    came.append(number)
    raise Stop

ct.init()
signal.signal(signal.SIGALRM, stop)
for moment in range(25):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005 * (1 + moment % 7), 0.1)
        while True:
            nvrtc.nvrtcVersion()
    except Stop:
        signal.setitimer(signal.ITIMER_REAL, 0)
print("came", len(came))
"""
IN_THE_COMPILER = """
import signal
import cudatool as ct
from cuda.bindings import nvrtc
from cudatool.sim.toolchain import nvrtc as stand_in

class Stop(Exception):
    pass

def stop(number, frame):
    raise Stop

def interrupted(*arguments, version=stand_in._version):
    signal.raise_signal(signal.SIGALRM)
    return version(*arguments)

ct.init()
signal.signal(signal.SIGALRM, stop)
stand_in._version = interrupted
calls = 0
try:
    while True:
        calls += 1
        nvrtc.nvrtcVersion()
except Stop:
    print("calls", calls)
"""
WHOLE_KERNEL = """
import os, signal, threading
import numpy as np
import cudatool as ct
count = ct.compile('extern "C" __global__ void count(volatile int *x, int n) {'
                   ' for (int i = 0; i < n; i++) x[threadIdx.x] += 1; }', "count")
x = ct.zeros(32, np.int32)
came = []
signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=32), count, x, 5_000_000)
timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
ct.synchronize()
timer.join()
print(came == [signal.SIGINT], (x.get() == 5_000_000).all())
"""
# A host function's interrupt ends the wait for the copy, which the stream has not come to.
GIVEN_UP = """
import ctypes, os, signal
import numpy as np
import cudatool as ct
from cuda.bindings import driver

x, out, stream = ct.ones(1024), np.zeros(1024, np.float32), ct.Stream()
ct.synchronize()
device, host, size, handle = x.data_ptr(), out.ctypes.data, out.nbytes, stream.core.handle
interrupt = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: os.kill(os.getpid(), signal.SIGINT))
address = ctypes.cast(interrupt, ctypes.c_void_p).value

def captured(function, *arguments):
    driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    driver.cuLaunchHostFunc(handle, address, 0)
    function(*arguments)
    return driver.cuGraphInstantiate(driver.cuStreamEndCapture(handle)[1], 0)[1]

def copy(function, *arguments):
    if function is not driver.cuGraphLaunch:
        driver.cuLaunchHostFunc(handle, address, 0)
    assert function(*arguments)[0] == 0
    print("not interrupted")

try:
    copy(COPY)
except KeyboardInterrupt:
    out[:] = 7  # it is the program's again
ct.synchronize()
print((out == 7).all(), (x.get() == 1).all())
"""
LARGE = ("sim:count=16,memory=4TiB", "")
LIMITED = ("sim", "ulimit -v 4000000; ")


@pytest.mark.parametrize(
    ("command", "program", "seed"),
    [("run", CORE, 0), ("run", CORE, 1), ("run", OURS, 0), ("run", OURS, 1), ("sanitize", CORE, 2)],
    ids=["run-core-0", "run-core-1", "run-ours-0", "run-ours-1", "sanitize-core"],
)
def test_interrupt_at_any_moment_is_a_keyboard_interrupt_and_status_130(
    tmp_path: Path, command: str, program: str, seed: int
) -> None:
    (tmp_path / "program.py").write_text(program)
    with subprocess.Popen(
        [sys.executable, "-m", "cudatool", command, "program.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            while "begins" not in (line := process.stdout.readline()):
                assert line, "the program ended before it began"
            time.sleep(random.Random(seed).uniform(0, 0.1))
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()  # it would go on for ever
    assert (process.returncode, output.count("KeyboardInterrupt")) == (130, 1), output
    assert "CUDA_ERROR" not in output and "ignored" not in output


def _run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def test_handlers_may_use_the_device_and_their_exceptions_reach_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANDLERS)
    done = subprocess.run(
        [sys.executable, "-m", "cudatool", "run", "program.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "stopped 25\n"), done.stderr


@pytest.mark.parametrize(
    "copy",
    [
        "driver.cuMemcpyDtoHAsync, host, device, size, handle",
        "driver.cuMemcpyDtoH, host, device, size",
        "driver.cuMemcpyHtoD, device, host, size",
        "driver.cuGraphLaunch, captured(driver.cuMemcpyDtoHAsync, host, device, size, handle), handle",
    ],
)
def test_copy_that_ctrl_c_gave_up_never_touches_the_programs_memory(copy: str) -> None:
    done = _run(GIVEN_UP.replace("COPY", copy))
    assert done.stdout == "True True\n", done.stdout + done.stderr


def test_no_exception_of_a_handler_is_lost_in_a_function_that_a_compiler_calls() -> None:
    done = _run(COMPILER)
    assert done.stdout == "came 25\n", done.stdout + done.stderr


def test_exception_of_a_handler_comes_when_the_call_of_the_compiler_returns() -> None:
    done = run_python(IN_THE_COMPILER, environment=ENVIRONMENT)
    assert done.stdout == "calls 1\n", done.stdout + done.stderr


def test_handler_that_returns_does_not_end_a_kernel() -> None:
    done = _run(WHOLE_KERNEL)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize(
    ("command", "device", "limit"),
    [
        ("run", *LARGE),
        ("devices", *LARGE),
        ("sanitize", *LIMITED),
        ("devices", *LIMITED),
    ],
    ids=["large-run", "large-devices", "limited-sanitize", "limited-devices"],
)
def test_addresses_that_are_not_to_be_had_are_one_line_and_status_2(
    tmp_path: Path, command: str, device: str, limit: str
) -> None:
    (tmp_path / "program.py").write_text("import cudatool as ct; ct.zeros(1)")
    program = "" if command == "devices" else "program.py"
    done = subprocess.run(
        ["bash", "-c", f"{limit}exec {sys.executable} -m cudatool {command} --device {device} {program}"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "of address space" in done.stderr, done.stderr


AT_THE_END = """
import os, signal, sys
class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)
sys.last = Last()  # goes when Python tidies up, where its own handler is gone
print("ends")
"""


def test_interrupt_while_python_tidies_up_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(AT_THE_END)
    done = subprocess.run(
        [sys.executable, "-m", "cudatool", "run", "-o", "out.ctrace", "program.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
    assert (tmp_path / "out.ctrace").exists()


ITSELF = """
import os, signal, sys
if "plain" not in sys.argv:
    import cudatool as ct
    ct.zeros(8).get()
def work():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**9): pass
work()
"""


def test_the_traceback_of_an_interrupt_has_the_programs_frames_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ITSELF)
    recorded, plain = (
        subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
        ).stderr
        for words in (["-m", "cudatool", "run", "program.py"], ["program.py", "plain"])
    )
    first, last = "Traceback", "KeyboardInterrupt\n"
    assert plain[plain.index(first) :].endswith(last)
    plain = plain[plain.index(first) : plain.index(last)].replace(f"{tmp_path}/", "")
    assert plain == recorded[recorded.index(first) : recorded.index(last)].replace(f"{tmp_path}/", "")
