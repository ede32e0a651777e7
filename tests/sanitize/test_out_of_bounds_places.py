"""An access far beside its buffer is said to be out of that buffer's bounds, and run and sanitize name one address."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver
from warm_process import COMMAND_LINE, run_python

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import FindingKind, check
from cudatool.trace import reader

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

SOURCE = """extern "C" __global__ void move(float* x, const float* y, long long i, long long j) { x[i] = y[j]; }"""
N = 1024


@pytest.mark.parametrize(
    ("i", "j", "argument", "place"),
    [
        (-1, 0, "x", "4 bytes before the start of 4 KiB"),
        (-1_000_000_000, 0, "x", "4,000,000,000 bytes before the start of 4 KiB"),
        (0, -50_000_000, "y", "200,000,000 bytes before the start of 4 KiB"),
        (2 * N, 0, "x", "4,096 bytes after the end of 4 KiB"),
        (0, 50_000_000, "y", "199,995,904 bytes after the end of 4 KiB"),
    ],
)
def test_place_is_relative_to_the_argument_that_the_address_was_computed_from(
    tmp_path: Path, i: int, j: int, argument: str, place: str
) -> None:
    kernel = ct.compile(SOURCE, "move")
    # A pool has segments of its own, so it is known what lies beside x.
    with record(tmp_path / "run.ctrace", checks=["memcheck"]), ct.use_mem_pool(ct.MemPool()):
        arrays = {"gap": ct.zeros(1), "x": ct.zeros(N), "y": ct.ones(N)}  # before x lie 508 bytes of no block
        one = ct.LaunchConfig(grid=1, block=1)
        ct.launch(ct.current_stream(), one, kernel, arrays["x"], arrays["y"], np.int64(i), np.int64(j))
        ct.synchronize()
    (finding,) = check(reader.read(tmp_path / "run.ctrace")).on_device
    index = i if argument == "x" else j
    start = arrays[argument].data_ptr()
    assert finding.kind is FindingKind.OUT_OF_BOUNDS
    assert (finding.text, finding.address) == (place, start + 4 * index)
    assert finding.buffer is not None and finding.buffer.address == start


def test_blocks_of_before_the_recording_have_bounds_and_values(tmp_path: Path) -> None:
    kernel, one = ct.compile(SOURCE, "move"), ct.LaunchConfig(grid=1, block=1)
    stream = ct.current_stream()
    x, y, freed = ct.zeros(100), ct.ones(100), ct.ones(100)
    ct.launch(stream, one, kernel, freed, y, np.int64(7), np.int64(0))
    address = freed.data_ptr()
    del freed
    with record(tmp_path / "run.ctrace", checks=["memcheck", "initcheck"]):
        ct.launch(stream, one, kernel, x, y, np.int64(3), np.int64(99))
        ct.launch(stream, one, kernel, x, y, np.int64(110), np.int64(0))
        ct.launch(stream, one, kernel, np.uint64(address), y, np.int64(0), np.int64(0))
        ct.synchronize()
    report = check(reader.read(tmp_path / "run.ctrace"), ["memcheck", "initcheck"])
    assert report.on_device[0].text == "40 bytes after the end of 400 B"
    assert [x.data_ptr() + 440, address] == [found.address for found in report.on_device]


@pytest.mark.parametrize("owner", ["cached block", "pool", "driver"])
def test_vector_store_across_the_end_is_out_of_bounds_though_the_memory_is_freed(tmp_path: Path, owner: str) -> None:
    source = 'extern "C" __global__ void put(float4* x) { x[threadIdx.x] = make_float4(1, 2, 3, 4); }'
    kernel, config = ct.compile(source, "put"), ct.LaunchConfig(grid=1, block=8)
    size = 8 * 16 - 8
    stream = ct.current_stream()
    with record(tmp_path / "run.ctrace", checks=["memcheck"]):
        if owner == "cached block":
            with ct.use_mem_pool(ct.MemPool()):
                array = ct.zeros(size // 4)
            ct.launch(stream, config, kernel, array)
            del array
        elif owner == "pool":
            _, address = driver.cuMemAllocAsync(size, stream.cuda_stream)
            ct.launch(stream, config, kernel, np.uint64(int(address)))
            driver.cuMemFreeAsync(address, stream.cuda_stream)
        else:
            _, address = driver.cuMemAlloc(size)
            ct.launch(stream, config, kernel, np.uint64(int(address)))
            driver.cuMemFree(address)
        stream.synchronize()
    (finding,) = check(reader.read(tmp_path / "run.ctrace")).on_device
    assert (finding.kind, finding.text) == (FindingKind.OUT_OF_BOUNDS, f"across the end of {size} B")


def test_pointer_of_the_host_is_still_one(tmp_path: Path) -> None:
    kernel, own = ct.compile(SOURCE, "move"), np.zeros(N, np.float32)
    with record(tmp_path / "run.ctrace", checks=["memcheck"]):
        x = ct.zeros(N)
        address = np.uint64(own.ctypes.data)
        ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=1), kernel, x, address, np.int64(0), np.int64(0))
        ct.synchronize()
    (finding,) = check(reader.read(tmp_path / "run.ctrace")).on_device
    assert finding.kind is FindingKind.HOST_POINTER


@pytest.mark.parametrize("index", [-1, -300_000, 50_000_000])
def test_run_and_sanitize_name_the_same_address_and_kernel(tmp_path: Path, index: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import cudatool as ct, numpy as np\n"
        "source = 'template <typename T> __global__ void put(T* x, long long i) { x[i] = 1; }'\n"
        "kernel = ct.compile(source, 'put<float>')\n"
        "one, x = ct.LaunchConfig(grid=1, block=1), ct.zeros(1024)\n"
        f"ct.launch(ct.current_stream(), one, kernel, x, np.int64({index}))\n"
        "ct.synchronize()\n"
    )
    named = []
    for command in (["run", "-o", "run.ctrace"], ["sanitize"]):
        done = run_python(COMMAND_LINE, *command, "--device", "sim", "program.py", folder=tmp_path)
        assert done.returncode == 1, done.stderr
        found = re.search(r"(?:illegal access at|address:) (0x[0-9a-f]+)", done.stdout + done.stderr)
        assert found, done.stderr
        assert "put<float>" in done.stdout + done.stderr and "_Z3put" not in done.stdout + done.stderr
        named.append(found[1])
    assert named[0] == named[1]
