"""`cudatool sanitize --checks`: programs with one mistake each, and the same programs without it."""

from __future__ import annotations

import json

import pytest

_HEAD = '''
import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = r"""
extern "C" __global__ void fill(int *a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = i;
}
extern "C" __global__ void sum(const int *a, int *total) {
    __shared__ int part[64];
    part[threadIdx.x] = a[threadIdx.x];
    BARRIER
    if (threadIdx.x == 0) {
        int all = 0;
        for (int i = 0; i < 64; ++i) all += part[i];
        *total = all;
    }
}
extern "C" __global__ void half(int *a) {
    if (threadIdx.x < LIMIT) __syncthreads();
    a[threadIdx.x] = 1;
}
extern "C" __global__ void odd(char *a) { *(int *)(a + STEP) = 1; }
extern "C" __global__ void expect(const int *a) {
    if (a[threadIdx.x] != 1) __trap();
}
extern "C" __global__ void add(int *__restrict__ a, const int *__restrict__ b) {
    a[threadIdx.x] = b[threadIdx.x] + 1;
}
"""

def kernel(name, **replaced):
    text = SOURCE
    for word, value in {"BARRIER": "__syncthreads();", "LIMIT": 64, "STEP": 4, **replaced}.items():
        text = text.replace(word, str(value))
    options = ProgramOptions(name="program.cu", arch=f"sm_{device.arch}", lineinfo=True)
    return Program(text, "c++", options).compile("ptx").get_kernel(name)

def run(function, block, *arguments):
    launch(stream, LaunchConfig(grid=1, block=block), function, *arguments)

def columns(width, to):
    """Copy the first bytes of each row of 32 over those that begin at `to`."""
    what = driver.CUDA_MEMCPY2D()
    what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    what.srcDevice, what.dstDevice, what.srcPitch, what.dstPitch = a, a + to, 32, 32
    what.WidthInBytes, what.Height = width, 7
    driver.cuMemcpy2D(what)

def ok(result):
    assert result[0] == 0, result
    return result[-1]

device = Device()
device.set_current()
stream = device.create_stream()
a = int(ok(driver.cuMemAlloc(4 * 64)))
b = int(ok(driver.cuMemAlloc(4)))
ok(driver.cuMemsetD32(a, 0, 64))
device.sync()
'''
_TAIL = """
stream.sync()
ok(driver.cuMemFree(a))
ok(driver.cuMemFree(b))
stream.close()
print("done")
"""

# name -> check, kind, the mistake, the same without it
MISTAKES = {
    "write behind an allocation": (
        "memcheck",
        "out-of-bounds",
        "run(kernel('fill'), 128, a, np.int32(65))",
        "run(kernel('fill'), 128, a, np.int32(64))",
    ),
    "use after free": (
        "memcheck",
        "use-after-free",
        "c = ok(driver.cuMemAlloc(256)); ok(driver.cuMemFree(c)); run(kernel('fill'), 64, int(c), np.int32(64))",
        "c = ok(driver.cuMemAlloc(256)); run(kernel('fill'), 64, int(c), np.int32(64)); ok(driver.cuMemFree(c))",
    ),
    "host pointer": (
        "memcheck",
        "host-pointer",
        "h = np.zeros(64, np.int32); run(kernel('fill'), 64, h.ctypes.data, np.int32(64)); assert not h.any()",
        "h = ok(driver.cuMemAllocHost(256)); run(kernel('fill'), 64, int(h), np.int32(64)); stream.sync(); "
        "ok(driver.cuMemFreeHost(h))",
    ),
    "misaligned": ("memcheck", "misaligned", "run(kernel('odd', STEP=2), 1, a)", "run(kernel('odd'), 1, a)"),
    "double free": (
        "memcheck",
        "double-free",
        "c = ok(driver.cuMemAlloc(256)); driver.cuMemFree(c); driver.cuMemFree(c)",
        "c = ok(driver.cuMemAlloc(256)); driver.cuMemFree(c)",
    ),
    "free of the middle": (
        "memcheck",
        "invalid-free",
        "driver.cuMemFree(a + 16)",
        "pass",
    ),
    "copy beyond the end": (
        "memcheck",
        "invalid-copy",
        "driver.cuMemcpyHtoD(a, np.zeros(65, np.int32).ctypes.data, 260)",
        "driver.cuMemcpyHtoD(a, np.zeros(64, np.int32).ctypes.data, 256)",
    ),
    "fill beyond the end": ("memcheck", "invalid-copy", "driver.cuMemsetD32(a, 0, 65)", "driver.cuMemsetD32(a, 0, 64)"),
    "copy over its own source": (
        "memcheck",
        "invalid-copy",
        "driver.cuMemcpyDtoD(a + 4, a, 252)",
        "driver.cuMemcpyDtoD(a + 128, a, 128); driver.cuMemcpyDtoD(a, a, 256)",
    ),
    "columns over columns": ("memcheck", "invalid-copy", "columns(8, 4)", "columns(8, 8)"),
    "uninitialized": (
        "initcheck",
        "uninitialized",
        "c = ok(driver.cuMemAlloc(256)); run(kernel('sum'), 64, int(c), b); stream.sync(); ok(driver.cuMemFree(c))",
        "run(kernel('sum'), 64, a, b)",
    ),
    "no barrier": (
        "racecheck",
        "kernel-race",
        "run(kernel('sum', BARRIER=''), 64, a, b)",
        "run(kernel('sum'), 64, a, b)",
    ),
    "written through one pointer and read through another": (
        "racecheck",
        "stale-read",
        "run(kernel('add'), 64, a, a)",
        "run(kernel('add'), 32, a, a + 128)",
    ),
    "barrier of some threads": (
        "synccheck",
        "barrier-divergence",
        "run(kernel('half', LIMIT=32), 64, a)",
        "run(kernel('half'), 64, a)",
    ),
    "leak": ("leak", "leak", "driver.cuMemAlloc(1 << 20)", "ok(driver.cuMemFree(ok(driver.cuMemAlloc(1 << 20))))"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_each_mistake_is_found(run_warm, tmp_path, mistake):
    check, kind, wrong, _ = MISTAKES[mistake]
    (tmp_path / "wrong.py").write_text(_HEAD + wrong + _TAIL)
    done = run_warm("sanitize", "--checks", "all", "--json", "wrong.py")
    report = json.loads(done.stdout)
    assert [(check, kind)] == [(one["check"], one["kind"]) for one in report["on_device"]], done.stderr
    assert done.returncode == 1
    assert "done" in done.stderr  # the run went on
    (found,) = report["on_device"]
    assert any(frame["file"].endswith("wrong.py") for frame in found["stack"])


def test_repairs_of_the_mistakes_are_clean(run_warm, tmp_path):
    (tmp_path / "right.py").write_text(
        "\ndevice.sync()\n".join([_HEAD, *(right for *_, right in MISTAKES.values()), _TAIL])
    )
    done = run_warm("sanitize", "--checks", "all", "right.py")
    assert (0, True) == (done.returncode, "no findings" in done.stdout), done.stdout + done.stderr
    assert "done" in done.stderr


_GUESS = """
import numpy as np, cudatool as ct
double = ct.compile('''extern "C" __global__ void twice(unsigned *p) {
    unsigned old = *p, assumed;
    do { assumed = old; old = atomicCAS(p, assumed, 2 * assumed); } while (old != assumed);
}''', "twice")
double[1, 32](ct.ones(1, np.uint32))
ct.synchronize()
"""


def test_a_warning_is_reported_and_leaves_status_zero(run_warm, tmp_path):
    (tmp_path / "guess.py").write_text(_GUESS)
    done = run_warm(
        "sanitize", "--checks", "racecheck", "--strict", "--format", "json=r.json", "--format", "text", "guess.py"
    )
    assert (0, True) == (done.returncode, "no findings, 1 warning" in done.stdout), done.stdout + done.stderr
    assert "Warnings: these break a rule and change no result. They do not fail the run." in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert ([], ["cas-guess"]) == (report["findings"], [one["kind"] for one in report["warnings"]])


def test_a_finding_names_thread_line_memory_and_launch(run_warm, tmp_path):
    (tmp_path / "wrong.py").write_text(_HEAD + MISTAKES["write behind an allocation"][2] + _TAIL)
    done = run_warm("sanitize", "wrong.py")
    for text in (
        "memcheck: access out of bounds",
        "write of 4 B in global memory by kernel fill",
        "thread:  (64, 0, 0) of block (0, 0, 0) at program.cu:4",
        "0 bytes after the end of 256 B",
        "wrong.py:",
        "buffer:  256 B at ",
    ):
        assert text in done.stdout, done.stdout


_BEHIND = """
import numpy as np, cudatool as ct
shift = ct.compile('''extern "C" __global__ void shift(const float *a, float *b) {
    b[threadIdx.x] = a[threadIdx.x + 1];
}''', "shift")
a, b = ct.zeros(128, np.float32), ct.zeros(128, np.float32)  # 512 bytes each: neighbours in a cached segment
shift[1, 128](a, b)
ct.synchronize()
"""


def test_the_byte_after_an_array_is_unallocated_without_caching(run_command, tmp_path):
    (tmp_path / "behind.py").write_text(_BEHIND)
    done = run_command("sanitize", "behind.py", environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert done.returncode == 1
    assert "0 bytes after the end of 512 B" in done.stdout
    assert "b[threadIdx.x] = a[threadIdx.x + 1];" in done.stdout


def test_blocks_of_the_caching_allocator_are_checked_to_the_byte(run_warm, tmp_path):
    (tmp_path / "blocks.py").write_text(
        """
import numpy as np
import cudatool as ct
fill = ct.compile('extern "C" __global__ void fill(float *a, int n)'
                  '{ if (threadIdx.x < n) a[threadIdx.x] = 1; }', "fill")
a, b = ct.empty(100, np.float32), ct.empty(100, np.float32)
fill[(1, 128)](a, 100 + EXTRA)
for _ in range(3):  # the block is used again after its array has gone, and the kernel that used it has not run
    c = ct.empty(64, np.float32)
    fill[(1, 128)](c, 64)
    del c
ct.synchronize()
"""
    )
    source = (tmp_path / "blocks.py").read_text()
    (tmp_path / "blocks.py").write_text(source.replace("EXTRA", "1"))
    report = json.loads(run_warm("sanitize", "--json", "blocks.py").stdout)
    assert ["out-of-bounds"] == [one["kind"] for one in report["on_device"]]
    assert 400 == report["on_device"][0]["buffer"]["size"]
    (tmp_path / "blocks.py").write_text(source.replace("EXTRA", "0"))
    done = run_warm("sanitize", "--checks", "all", "blocks.py")
    assert 0 == done.returncode, done.stdout


@pytest.mark.parametrize("mistake", [False, True])
def test_a_block_has_its_old_values_until_the_kernel_that_reads_them_has_run(run_warm, tmp_path, mistake):
    read = "copy[(1, 64)](b, y)" if mistake else "copy[(1, 64)](y, b); copy[(1, 64)](b, y)"
    (tmp_path / "again.py").write_text(
        f"""
import cudatool as ct
copy = ct.compile('extern "C" __global__ void copy(float *to, const float *from)'
                  '{{ to[threadIdx.x] = from[threadIdx.x]; }}', "copy")
x, b = ct.ones(64), ct.empty(64)
ct.synchronize()
copy[(1, 64)](b, x)
del x           # the kernel has not run,
y = ct.empty(64)  # and its block is used again
{read}
ct.synchronize()
"""
    )
    report = json.loads(run_warm("sanitize", "--json", "--checks", "initcheck", "again.py").stdout)
    assert ["uninitialized"] * mistake == [one["kind"] for one in report["on_device"]]


def test_a_product_gives_values_to_a_block_that_earlier_work_still_used(run_warm, tmp_path):
    (tmp_path / "products.py").write_text(
        """
import cudatool as ct
x = ct.ones((32, 32))
for _ in range(3):
    y = ct.matmul(x, x)
    z = y + y   # y's block is used again by the next product, while this has not run
    del y, z
ct.synchronize()
"""
    )
    done = run_warm("sanitize", "--checks", "initcheck", "products.py")
    assert 0 == done.returncode, done.stdout


def test_a_wild_access_does_not_reach_another_allocation(run_warm, tmp_path):
    others = "for _ in range(100): ok(driver.cuMemAlloc(512))\n"
    (tmp_path / "wrong.py").write_text(_HEAD + others + "run(kernel('expect'), 1, a + 32768)\nstream.sync()")
    done = run_warm("sanitize", "--json", "wrong.py")
    assert ["out-of-bounds"] == [one["kind"] for one in json.loads(done.stdout)["on_device"]]


def test_space_between_allocations_takes_no_memory_that_is_short(run_warm, tmp_path):
    many = "ok(driver.cuMemAlloc(5 << 20))\nfor _ in range(1000): ok(driver.cuMemAlloc(512))"
    (tmp_path / "many.py").write_text(_HEAD + many)
    done = run_warm("sanitize", "--device", "sim:memory=8MiB", "many.py")
    assert (0, True) == (done.returncode, "no findings" in done.stdout), done.stdout + done.stderr


def test_what_was_found_before_a_kernel_trapped_is_reported(run_warm, tmp_path):
    (tmp_path / "wrong.py").write_text(_HEAD + "run(kernel('expect'), 1, a + 256)\nstream.sync()")
    done = run_warm("sanitize", "--json", "wrong.py")
    assert "trap at program.cu:22" in done.stderr
    assert [("memcheck", "out-of-bounds")] == [
        (one["check"], one["kind"]) for one in json.loads(done.stdout)["on_device"]
    ]


def test_repeated_findings_are_counted(run_warm, tmp_path):
    again = "for _ in range(3): run(kernel('fill'), 128, a, np.int32(70))"
    (tmp_path / "wrong.py").write_text(_HEAD + again + _TAIL)
    report = json.loads(run_warm("sanitize", "--json", "wrong.py").stdout)
    assert [18] == [one["count"] for one in report["on_device"]]


def test_an_unknown_check_is_refused_in_one_line(run_warm, tmp_path):
    (tmp_path / "x.py").write_text("")
    done = run_warm("sanitize", "--checks", "race,memchek", "x.py")
    assert done.returncode == 2
    assert "memchek" in done.stderr
    assert 1 == done.stderr.count("\n")


def test_only_what_is_asked_for_is_looked_for(run_warm, tmp_path):
    (tmp_path / "wrong.py").write_text(_HEAD + MISTAKES["no barrier"][2] + _TAIL)
    assert 0 == run_warm("sanitize", "wrong.py").returncode  # racecheck costs much, so it is not the default
    assert 1 == run_warm("sanitize", "--checks", "racecheck", "wrong.py").returncode
