"""A repair is said in the calls of the library that the program uses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.sanitize.advice import CALLS
from cudatool.trace import reader
from cudatool.trace.events import Api, Kind

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

N = 1024
FILL = ct.compile(
    'extern "C" __global__ void fill(float *x, float value) { x[blockIdx.x * blockDim.x + threadIdx.x] = value; }',
    "fill",
)


@pytest.fixture(autouse=True)
def with_a_current_context() -> None:
    """What calls the driver itself needs one, and a test before may have left none."""
    ct.set_device(0)


def _repair(tmp_path: Any, program: Any) -> str:
    with record(tmp_path / "run.ctrace", measure_accesses=True):
        program()
        ct.synchronize()
    (finding,) = check(reader.read(tmp_path / "run.ctrace")).findings
    return finding.repair


def _core() -> None:
    from cuda.core import Device, LaunchConfig, launch

    device = Device()
    device.set_current()
    one, two = device.create_stream(), device.create_stream()
    buffer = device.memory_resource.allocate(4 * N, stream=one)
    one.sync()
    for stream in (one, two):
        launch(stream, LaunchConfig(grid=N // 128, block=128), FILL.core, buffer, np.float32(1))
    device.sync()


def _core_host() -> None:
    from cuda.core import Device, LegacyPinnedMemoryResource

    device = Device()
    device.set_current()
    stream = device.create_stream()
    staging = LegacyPinnedMemoryResource().allocate(4 * N)
    target = device.memory_resource.allocate(4 * N, stream=stream)
    target.copy_from(staging, stream=stream)
    np.from_dlpack(staging).view(np.uint8)[:] = 3
    stream.sync()


def _bindings() -> None:
    from cuda.bindings import driver

    one, two = (driver.cuStreamCreate(1)[1] for _ in range(2))
    _, x = driver.cuMemAlloc(N)
    driver.cuMemsetD8Async(x, 1, N, one)
    driver.cuMemsetD8Async(x, 2, N, two)
    driver.cuCtxSynchronize()


def _runtime() -> None:
    one, two, x = ct.Stream(), ct.Stream(), ct.zeros(N)
    ct.synchronize()
    for stream in (one, two):
        ct.launch(stream, ct.LaunchConfig(grid=N // 128, block=128), FILL, x, np.float32(1))


@pytest.mark.parametrize(
    ("program", "call"),
    [
        (_core, "`consumer.wait(producer)`, or `consumer.wait(event)` with the event recorded after"),
        (_core_host, "`stream.sync()`"),
        (_bindings, "`cuStreamWaitEvent(consumer, event, 0)` with the event recorded after"),
        (_runtime, "`consumer.wait_stream(producer)`, or `consumer.wait_event(event)` with the event recorded after"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_repair_is_said_in_the_calls_of_the_programs_library(tmp_path: Any, program: Any, call: str) -> None:
    assert call in _repair(tmp_path, program)


def test_numba_is_recognized_by_its_frames(tmp_path: Any) -> None:
    from cuda.bindings import driver

    namespace = {"__name__": "numba_cuda.numba.cuda.cudadrv.driver", "driver": driver}
    exec("def create(): return driver.cuStreamCreate(1)[1]", namespace)
    with record(tmp_path / "run.ctrace"):
        stream = namespace["create"]()
    made = reader.read(tmp_path / "run.ctrace").of_kind(Kind.STREAM_CREATE)
    assert made["aux1"][made["address"] == int(stream)].tolist() == [Api.NUMBA]
    assert CALLS[Api.NUMBA].wait_event == "event.wait(consumer)"


NUMBA = """
import numpy as np
from numba import cuda

@cuda.jit
def fill(x):
    x[cuda.grid(1)] = 1

first, second = cuda.stream(), cuda.stream()
x = cuda.device_array(128, np.float32)
fill[1, 128, first](x)
fill[1, 128, second](x)
"""


def test_real_numba_program_is_repaired_in_numbas_calls(tmp_path: Any) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    (tmp_path / "program.py").write_text(NUMBA)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cudatool", "sanitize", "--device", "sim", "--json", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert "`event.wait(consumer)` with the event recorded after kernel __main__::fill" in finding["repair"]
    assert "(`event.record(producer)`)" in finding["repair"]
    assert ["kernel __main__::fill"] * 2 == [finding[one]["operation"] for one in ("first", "second")]


def test_every_library_has_its_calls() -> None:
    assert set(CALLS) == set(Api)


def test_write_of_the_host_says_that_it_was_noticed_at_a_call(tmp_path: Any) -> None:
    with record(tmp_path / "run.ctrace", measure_accesses=True):
        _core_host()
    (finding,) = check(reader.read(tmp_path / "run.ctrace")).findings
    assert (finding.first.noticed, finding.second.noticed) == (False, True)
    assert finding.first.operation == "cuMemcpyAsync"
    assert finding.size == 4 * N
