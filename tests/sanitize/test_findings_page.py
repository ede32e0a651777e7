"""docs/findings.md says of each kind what the table says, and its examples have what they are examples of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from warm_process import run_python

from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.kinds import CHECKS, KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
SECTIONS = dict(re.findall(r"^### ([\w-]+)\n\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
START = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]

# Runs each program of a JSON list in one process, under the check of its kind, and prints the kinds that it found.
_RUNNER = """
import gc, json, os, sys, tempfile
import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.trace import reader

for name, checks, source in json.loads(sys.argv[1]):
    path = os.path.join(tempfile.mkdtemp(dir="."), "t.ctrace")
    inside = [one for one in checks if one not in ("race", "leak")]
    with record(path, device="sim:count=2", measure_accesses="race" in checks, checks=inside):
        names = {}
        try:
            exec(compile(source, f"{name}.py", "exec"), names)
        except Exception as error:
            print(json.dumps([name, repr(error)]), file=sys.stderr)
            continue
        try:
            ct.synchronize()
        except ct.CudaError:
            pass  # that is what is to be found
        names.clear()
        gc.collect()
    report = check(reader.read(path), checks)
    print(json.dumps([name, sorted({one.kind for one in report.all})]), file=sys.stderr)
    if "kernel-error" not in (one.kind for one in report.all):  # else there is no context any more
        ct.empty_cache()
"""


def checks_of_sections() -> dict[str, str]:
    """Return the check that the heading above each section names."""
    found, check = {}, ""
    for line in PAGE.splitlines():
        if match := re.match(r"## .*`--checks (\w+)`", line):
            check = match[1]
        elif match := re.match(r"### ([\w-]+)", line):
            found[match[1]] = check
    return found


def wrong_and_repaired(kind: str) -> tuple[str, str]:
    (example,) = re.findall(r"```python\n(.*?)```", SECTIONS[kind], re.DOTALL)
    lines = example.splitlines(keepends=True)
    repaired = [re.sub(r"(#|//) repair: ", "", line) for line in lines if not line.endswith(" wrong\n")]
    assert repaired != lines
    return START + example, START + "".join(repaired)


# What the page says besides its examples: program after START, check, and the kinds that it has.
CLAIMS = {
    "two reads need no order": (
        "race",
        "ct.launch(one, config, copy, y, x, N)\nz = ct.zeros(N, np.float32)\nct.synchronize()\n"
        "ct.launch(two, config, copy, z, x, N)",
        [],
    ),
    "both write the same value": ("race", "for s in (one, two):\n    ct.launch(s, config, fill, x, N)", ["race-waw"]),
    "a query that said that the work is done orders": (
        "race",
        "pinned = ct.empty_pinned(N)\nview = ct.host_view(pinned)\nwith ct.stream(one):\n"
        "    x.get(pinned, blocking=False)\nwhile not one.query():\n    pass\nprint(view[0])",
        [],
    ),
    "a record after the wait changes nothing": (
        "race",
        "_, event = driver.cuEventCreate(0)\nct.launch(one, config, fill, x, N)\n"
        "driver.cuStreamWaitEvent(two.cuda_stream, event, 0)\ndriver.cuEventRecord(event, one.cuda_stream)\n"
        "ct.launch(two, config, copy, y, x, N)",
        ["race-raw", "wait-unrecorded"],
    ),
    "a graph launched after its memory was freed": (
        "race",
        "_, block = driver.cuMemAlloc(4 * N)\n"
        "driver.cuStreamBeginCapture(one.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)\n"
        "ct.launch(one, config, fill, np.uint64(int(block)), N)\n_, graph = driver.cuStreamEndCapture(one.cuda_stream)\n"
        "_, executable = driver.cuGraphInstantiate(graph, 0)\ndriver.cuMemFree(block)\n"
        "driver.cuGraphLaunch(executable, one.cuda_stream)",
        ["use-after-free"],
    ),
    "memcheck sees a kernel that touches freed memory": (
        "memcheck",
        "_, block = driver.cuMemAlloc(4 * N)\ndriver.cuMemFree(block)\n"
        "ct.launch(one, config, fill, np.uint64(int(block)), N)",
        ["use-after-free"],
    ),
    "a copy to the host of memory never written": (
        "initcheck",
        "_, block = driver.cuMemAlloc(4 * N)\ndriver.cuMemcpyDtoH(np.zeros(N, np.float32), block, 4 * N)\n"
        "driver.cuMemFree(block)",
        ["uninitialized"],
    ),
    "a copy on the device of memory never written": (
        "initcheck",
        "_, block = driver.cuMemAlloc(8 * N)\ndriver.cuMemcpyDtoD(int(block) + 4 * N, block, 4 * N)\n"
        "driver.cuMemFree(block)",
        [],
    ),
    "the copy counts as never written": (
        "initcheck",
        "_, block = driver.cuMemAlloc(8 * N)\ndriver.cuMemcpyDtoD(int(block) + 4 * N, block, 4 * N)\n"
        "ct.launch(one, config, copy, y, np.uint64(int(block) + 4 * N), N)\nct.synchronize()\ndriver.cuMemFree(block)",
        ["uninitialized"],
    ),
    "a mask may name threads that have ended": (
        "synccheck",
        'SHORT = \'extern "C" __global__ void f(float *x) { if (threadIdx.x < 16) '
        "x[threadIdx.x] = __shfl_sync(0xffffffffu, x[threadIdx.x], 0); }'\n"
        'ct.launch(one, ct.LaunchConfig(grid=1, block=32), ct.compile(SHORT, "f"), x)',
        [],
    ),
    "the second of two frees in stream order is one too many": (
        "memcheck",
        "_, block = driver.cuMemAllocAsync(256, one.cuda_stream)\ndriver.cuMemFreeAsync(block, one.cuda_stream)\n"
        "driver.cuMemFreeAsync(block, one.cuda_stream)",
        ["double-free"],
    ),
    "memory from no pool may be freed in stream order": (
        "memcheck",
        "_, block = driver.cuMemAlloc(256)\ndriver.cuMemFreeAsync(block, one.cuda_stream)",
        [],
    ),
    "what rounding adds to a block is out of bounds, also where a larger block was": (
        "memcheck",
        "z = ct.empty(N, np.float32)\nct.launch(ct.current_stream(), config, fill, z, N)\ndel z\n"
        "z = ct.empty(N - 1, np.float32)\nct.launch(ct.current_stream(), config, fill, z, N)",
        ["out-of-bounds"],
    ),
    "a block of a caching allocator ends where it was asked to": (
        "memcheck",
        "driver.cuMemsetD8Async(x.data_ptr(), 0, 4 * N + 1, one.cuda_stream)",
        ["invalid-copy"],
    ),
    "a kernel frees memory of its heap twice": (
        "memcheck",
        # In a context of its own, which it ends.
        "_, own = driver.cuCtxCreate(None, 0, 0)\n"
        "source = b'extern \"C\" __global__ void twice() { void *p = malloc(4); free(p); free(p); }'\n"
        "from cuda.bindings import nvrtc\n"
        "_, made = nvrtc.nvrtcCreateProgram(source, b'twice.cu', 0, [], [])\nnvrtc.nvrtcCompileProgram(made, 0, [])\n"
        "text = bytes(nvrtc.nvrtcGetPTXSize(made)[1])\nnvrtc.nvrtcGetPTX(made, text)\n"
        "_, module = driver.cuModuleLoadData(text)\n_, twice = driver.cuModuleGetFunction(module, b'twice')\n"
        "driver.cuLaunchKernel(twice, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)\nassert driver.cuCtxSynchronize()[0] != 0\n"
        "driver.cuCtxDestroy(own)",
        ["invalid-free"],
    ),
    "blocks of the kernels' heap leak": (
        "leak",
        "source = 'extern \"C\" __global__ void take(int free_it) { void *p = malloc(4); if (free_it) free(p); }'\n"
        "take = ct.compile(source, 'take')\n"
        "for free_it in (0, 1):\n    ct.launch(one, ct.LaunchConfig(grid=1, block=2), take, np.int32(free_it))",
        ["leak"],
    ),
    "kernels that free what they take leak nothing": (
        "leak",
        "source = 'extern \"C\" __global__ void take(int free_it) { void *p = malloc(4); if (free_it) free(p); }'\n"
        "ct.launch(one, ct.LaunchConfig(grid=1, block=2), ct.compile(source, 'take'), np.int32(1))",
        [],
    ),
    "pinned memory leaks": ("leak", "driver.cuMemHostAlloc(4096, 0)", ["leak"]),
    "cached blocks are no leak": ("leak", "z = ct.zeros(N, np.float32)\ndel z", []),
    "an empty pool is no leak, what was allocated from it is": (
        "leak",
        "p = driver.CUmemPoolProps()\np.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED\n"
        "p.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE\n"
        "_, full = driver.cuMemPoolCreate(p)\n_, empty = driver.cuMemPoolCreate(p)\n"
        "driver.cuMemAllocFromPoolAsync(4096, full, one.cuda_stream)\n"
        "_, back = driver.cuMemAllocFromPoolAsync(4096, empty, one.cuda_stream)\n"
        "driver.cuMemFreeAsync(back, one.cuda_stream)",
        ["leak"],
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    """The kinds found in the example of each kind, as it is and repaired."""
    programs = []
    for kind, check in checks_of_sections().items():
        for name, source in zip((kind, f"{kind} repaired"), wrong_and_repaired(kind), strict=True):
            programs.append((name, [check], source))
    programs += [(claim, [check], START + source) for claim, (check, source, _) in CLAIMS.items()]
    programs.sort(key=lambda program: program[0] == "kernel-error")  # after it, nothing runs in this process
    done = run_python(_RUNNER, json.dumps(programs), folder=tmp_path_factory.mktemp("examples"))
    assert 0 == done.returncode, done.stderr
    return dict(json.loads(line) for line in done.stderr.splitlines() if line.startswith("["))


def test_every_kind_has_a_row_and_a_section():
    assert list(FindingKind) == list(KINDS)
    assert sorted(FindingKind) == sorted(SECTIONS)


def test_every_check_has_a_heading():
    assert set(CHECKS) == set(checks_of_sections().values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_section_begins_with_the_help_of_the_table_and_names_a_rule(kind):
    assert KINDS[kind].help == " ".join(SECTIONS[kind].split("\n\n")[0].split())
    assert "\nRule: " in SECTIONS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_title_is_a_heading_and_the_help_is_sentences(kind):
    text = KINDS[kind]
    assert not text.title.endswith(".")
    assert 70 >= len(text.title)
    assert text.help.endswith(".")


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_the_page_says_besides_its_examples_is_so(found, claim):
    assert CLAIMS[claim][2] == found[claim]


@pytest.mark.parametrize("kind", SECTIONS)
def test_the_example_has_its_finding_and_none_once_repaired(found, kind):
    # A wait that does nothing is told beside the race that it does not prevent.
    expected = ["race-raw", kind] if kind == "wait-unrecorded" else [kind]
    assert (expected, []) == (found[kind], found[f"{kind} repaired"])
