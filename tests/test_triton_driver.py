"""Programs with Triton's kernels on the software device; Triton must be installed."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cudatool as ct
from cudatool.recording import record
from cudatool.runtime import calls
from cudatool.sanitize import check
from cudatool.trace.events import Kind
from cudatool.trace.reader import read

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

tl = pytest.importorskip("triton.language")


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(out + i, v * 2, mask=i < n)


@triton.jit
def total(x, out, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.sum(tl.load(x + i), 0)
    if ATOMIC:
        tl.atomic_add(out, s)
    else:
        tl.store(out, tl.load(out) + s)


@triton.jit
def product(a, b, c, K, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    sums = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for k in range(0, K, SIZE):
        sums = tl.dot(tl.load(a + rows * K + k + columns), tl.load(b + (k + rows) * SIZE + columns), sums)
    tl.store(c + rows * SIZE + columns, sums)


@triton.autotune(configs=[triton.Config({"BLOCK": block}, num_warps=1) for block in (32, 256)], key=[])
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def test_a_kernel_runs_on_our_arrays_and_on_our_current_stream(tmp_path):
    x, out, stream = ct.asarray(np.arange(768, dtype="f4")), ct.zeros(768, "f4"), ct.Stream()
    stream.wait_stream(ct.current_stream())
    with record(tmp_path / "run.ctrace"), ct.stream(stream):
        double[(3,)](x, out, 768, BLOCK=256)
        stream.synchronize()
    assert np.array_equal(np.arange(768) * 2, out.get())
    trace = read(tmp_path / "run.ctrace")
    launches = trace.records[trace.records["kind"] == Kind.KERNEL_LAUNCH]
    assert [("double", True)] == [(trace.names[row["name"]], bool(row["stream"])) for row in launches]


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn], ids=str)
def test_products_are_those_of_numpy(dtype):
    a, b = (np.random.default_rng(0).standard_normal(shape).astype(dtype) for shape in ((32, 96), (96, 32)))
    c = ct.zeros((32, 32), "f4")
    product[(1,)](ct.asarray(a), ct.asarray(b), c, 96, SIZE=32)
    assert np.allclose(a.astype("f8") @ b.astype("f8"), c.get(), atol=1e-2)


def test_the_autotuner_measures_on_the_virtual_clock():
    x, out = ct.zeros(1000, "f4"), ct.zeros(1000, "f4")
    took = []
    for _ in range(2):
        tuned.cache.clear()
        tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, out, 1000)
        took.append({str(config): time for config, time in tuned.configs_timings.items()})
    assert took[0] == took[1]
    assert (out.get() == 1).all()


def test_the_autotuner_translates_and_runs_only_what_it_chooses(monkeypatch):
    from cudatool.sim.jit import code

    translated = []
    load = code.load_object
    monkeypatch.setattr(code, "load_object", lambda data: translated.append(data) or load(data))
    x, out = ct.zeros(1000, "f4"), ct.zeros(1000, "f4")
    tuned.cache.clear()
    tuned.fn.device_caches.clear()  # as in a new process
    tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, out, 1000)
    assert (out.get() == 1).all()
    assert (1, 2) == (len(translated), len(tuned.configs_timings))


def test_a_recording_has_the_launches_of_the_autotuner(tmp_path):
    x, out = ct.zeros(1000, "f4"), ct.zeros(1000, "f4")
    tuned.cache.clear()
    with record(tmp_path / "run.ctrace"):
        tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, out, 1000)
        ct.synchronize()
    trace = read(tmp_path / "run.ctrace")
    launches = trace.records[trace.records["kind"] == Kind.KERNEL_LAUNCH]
    assert ["tuned"] * 3 == [trace.names[row["name"]] for row in launches]


def test_a_missing_mask_is_found_with_its_line(tmp_path):
    ct.empty_cache()  # of what was reserved before, the recording knows no blocks
    with record(tmp_path / "run.ctrace", measure_accesses=True, checks=["memcheck"]):
        x, out = ct.zeros(1000, "f4"), ct.zeros(1000, "f4")
        double[(4,)](x, out, 1000, BLOCK=256)
        ct.synchronize()
    (found,) = check(read(tmp_path / "run.ctrace")).on_device
    file, line = found.source
    assert ("out-of-bounds", Path(file).name) == (found.kind.value, Path(__file__).name)
    assert "v = tl.load(x + i)" == Path(__file__).read_text().splitlines()[line - 1].strip()


@pytest.mark.parametrize(("programs", "atomic", "expected"), [(3, False, True), (3, True, False), (1, False, False)])
def test_programs_race_and_the_threads_of_one_do_not(tmp_path, programs, atomic, expected):
    x, out = ct.full(768, 1.0, dtype="f4"), ct.zeros(1, "f4")
    with record(tmp_path / "run.ctrace", checks=["racecheck"]):
        total[(programs,)](x, out, BLOCK=256, ATOMIC=atomic)
        ct.synchronize()
    report = check(read(tmp_path / "run.ctrace"))
    assert expected == any(found.kind.value == "kernel-race" for found in report.on_device)


def test_no_ptxas_is_run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import cudatool as ct, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def fill(x, B: tl.constexpr):\n"
        "    tl.store(x + tl.arange(0, B), 7)\n"
        "x = ct.zeros(32, 'i4')\n"
        "fill[(1,)](x, B=32)\n"
        "print(x.get().sum())\n"
    )
    environment = {
        "CUDATOOL_DEVICE": "sim",
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "TRITON_PTXAS_PATH": "/bin/false",
        "TRITON_PTXAS_BLACKWELL_PATH": "/bin/false",
    }
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert "224\n" == done.stdout, done.stderr


def test_without_a_cache_no_folder_is_left_and_a_child_leaves_its_parents(tmp_path):
    program = tmp_path / "forks.py"
    program.write_text(_FORKS)
    environment = {
        "PATH": "/usr/bin",
        "TMPDIR": str(tmp_path),
        "CUDATOOL_DEVICE": "sim",
        "CUDATOOL_CACHE_DIR": "/dev/null",
    }
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert "['libcuda.so', 'libcuda.so.1']\n" == done.stdout, done.stderr
    assert [] == list(tmp_path.glob("cudatool-*"))


_FORKS = """
import glob, os, sys
import triton
import cudatool as ct
ct.init()
triton.runtime.driver.active
if not os.fork():
    sys.exit()
os.wait()
print(sorted(os.listdir(glob.glob(os.environ["TMPDIR"] + "/cudatool-*")[0])))
"""


def test_inline_assembly_is_of_the_line_that_it_stands_for():
    from cudatool import triton_driver  # imports Triton

    ptx = "\n".join(
        (
            ".reqntid 128",
            "{",
            "\t.loc\t1 7 9",
            "\t// begin inline asm",
            "\t.loc\t1 7 9",
            "\tmov.u32 %r1, 0x0;",
            "\t.loc\t1 8 9",
            "\t@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];",
            "\t// end inline asm",
            "\t.loc\t1 9 9",
            "}",
        )
    )
    finished = triton_driver._finished(ptx)
    assert ["7", "7", "9"] == re.findall(r"\.loc\t1 (\d+)", finished)
    assert finished.startswith('.pragma "cudatool.programs";\n.reqntid')


def test_a_tensor_of_the_host_is_there_for_kernels_while_it_lives(tmp_path):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if torch.version.cuda:
        pytest.skip("needs PyTorch's build for processors")
    device = triton.runtime.driver.active.get_active_torch_device()
    for size in (1000, 2000, 1000):  # memory that was freed is used again
        x = torch.ones(size, device=device)
        out = torch.empty_like(x)
        double[(size // 8,)](x, out, size, BLOCK=8)
        assert 2 * size == out.sum()  # with nothing that waits
    with record(tmp_path / "run.ctrace", checks=["memcheck"]):
        double[(126,)](x, out, 1000, BLOCK=8)
    (found,) = check(read(tmp_path / "run.ctrace")).on_device
    assert "out-of-bounds" == found.kind.value


@triton.jit
def sum_of_parts(parts, sums, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    part = tl.load(parts + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    result = tl.load(sums + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(result + i, tl.load(part + i) + 1)
    tl.store(out + tl.program_id(0), 1)


def _tensors_of_processors():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if torch.version.cuda:
        pytest.skip("this PyTorch is built for CUDA")
    triton.runtime.driver.active.get_active_torch_device()
    return torch


@pytest.mark.parametrize(("programs", "atomic", "expected"), [(3, False, True), (3, True, False)])
def test_programs_that_race_on_tensors_of_pytorch_are_found(tmp_path, programs, atomic, expected):
    torch = _tensors_of_processors()
    with record(tmp_path / "run.ctrace", checks=["racecheck"]):
        x, out = torch.ones(800), torch.zeros(2)
        total[(programs,)](x[32:], out[1:], BLOCK=256, ATOMIC=atomic)
    report = check(read(tmp_path / "run.ctrace"))
    assert expected == any(found.kind.value == "kernel-race" for found in report.on_device)
    assert float(out[0]) == 0
    assert float(out[1]) > 0
    assert float(out[1]) == 256 * programs or not atomic


@pytest.fixture(autouse=True)
def _tensors_of_this_test_alone():
    """The memory of a test's tensors is another one's later: none stays registered."""
    yield
    driver = sys.modules.get("cudatool.triton_driver")
    while driver is not None and driver._registered:
        address, _ = driver._registered.popitem()
        calls.driver.cuMemHostUnregister(address)


class HostTensor:
    """What the launcher asks of one of PyTorch's tensors in the host's memory, and of its storage."""

    device, dtype = SimpleNamespace(type="cpu"), np.dtype("f4")

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=lambda: self.values.ctypes.data, nbytes=lambda: self.values.nbytes)


def test_a_launch_on_tensors_of_the_host_is_done_when_it_returns(tmp_path, monkeypatch):
    weak = SimpleNamespace(StorageWeakRef=lambda storage: SimpleNamespace(expired=lambda: False))
    double[(1,)](
        ct.zeros(256, "f4"), ct.zeros(256, "f4"), 256, BLOCK=256
    )  # what Triton does once asks PyTorch for more
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=HostTensor))
    monkeypatch.setitem(sys.modules, "torch.multiprocessing.reductions", weak)
    x, out = (HostTensor(np.full(800, value, np.float32)) for value in (1, 0))
    with record(tmp_path / "run.ctrace"):
        for _ in range(2):
            double[(3,)](x, out, 700, BLOCK=256)
            out.values += 1
    assert [3, 1] == [out.values[699], out.values[700] - 1]
    report = check(read(tmp_path / "run.ctrace"))
    assert ((), ()) == (report.findings, report.possible)
    assert 2 == report.edges["stream synchronize"]


@pytest.mark.parametrize(("recorded", "times"), [(False, 1), (True, 3)])
def test_memory_of_a_tensor_that_is_gone_is_registered_again_for_recordings_only(
    tmp_path, monkeypatch, recorded, times
):
    double[(1,)](ct.zeros(256, "f4"), ct.zeros(256, "f4"), 256, BLOCK=256)  # as above
    turn, registered, register = 0, [], calls.driver.cuMemHostRegister

    def reference(storage):  # to a storage that is gone when the next turn begins
        made = turn
        return SimpleNamespace(expired=lambda: made < turn)

    def noted(address, *given):
        registered.append(address)
        return register(address, *given)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=HostTensor))
    monkeypatch.setitem(sys.modules, "torch.multiprocessing.reductions", SimpleNamespace(StorageWeakRef=reference))
    monkeypatch.setattr(calls.driver, "cuMemHostRegister", noted)
    x, out = (HostTensor(np.full(900, value, np.float32)) for value in (1, 0))
    with record(tmp_path / "run.ctrace") if recorded else nullcontext():
        for turn in range(3):  # noqa: B007  # references look at it
            double[(3,)](x, out, 700, BLOCK=256)
    assert (2, 2) == (out.values[0], out.values[699])
    assert sorted([x.data_ptr(), out.data_ptr()] * times) == sorted(registered)


@pytest.mark.parametrize("checks", [["memcheck"], ["memcheck", "racecheck"]], ids=str)
def test_tensors_of_pytorch_whose_addresses_are_in_a_table_are_memory_of_kernels(tmp_path, checks):
    torch = _tensors_of_processors()
    with record(tmp_path / "run.ctrace", checks=checks):
        parts, sums = ([torch.zeros(64) for _ in range(4)] for _ in range(2))
        tables = [torch.tensor([each.data_ptr() for each in tensors]) for tensors in (parts, sums)]
        out = torch.zeros(4)
        sum_of_parts[(4,)](*tables, out, SIZE=64)
    assert [] == list(check(read(tmp_path / "run.ctrace")).on_device)
    assert all(bool((each == 1).all()) for each in (*sums, out))
