"""The report when memory runs out: right culprit, and a program that ends as it would have without it."""

from __future__ import annotations

import importlib
import json
import pickle
import re
from pathlib import Path

import pytest
from warm_process import PLAIN_PYTEST, run_python

from cudatool.trace.reader import read

_HOG = """
import cudatool as ct
kept = []
def hog(n=60 << 20):
    kept.append(ct.empty(n, "u1"))
    return kept[-1]
def modest():
    return ct.empty(1 << 20, "u1")
small = [modest() for _ in range(4)]
"""
_DEVICE = "sim:memory=256MiB"

# Programs whose memory runs out, each in another place; in all of them, `hog` holds most.
_PROGRAMS = {
    "plain": "while True: hog()",
    "caught": """
try:
    while True: hog()
except ct.OutOfMemoryError as error:
    print("caught", type(error).__name__)
""",
    "retried": """
for attempt in range(3):
    try:
        for _ in range(8): hog()
    except ct.OutOfMemoryError:
        print("attempt", attempt)
        kept.clear()
""",
    "swallowed by a bare except": """
try:
    while True: hog()
except BaseException: pass
raise SystemExit(7)
""",
    "a thread": """
import threading
def work():
    while True: hog()
t = threading.Thread(target=work, name="worker"); t.start(); t.join()
print("main goes on")
""",
    "an executor": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda _: hog(), range(9)))
""",
    "asyncio": """
import asyncio
async def one():
    while True:
        hog(); await asyncio.sleep(0)
async def main():
    await asyncio.gather(one(), asyncio.sleep(0.01))
asyncio.run(main())
""",
    "asyncio in a thread": """
import asyncio
async def main():
    await asyncio.to_thread(lambda: [hog() for _ in range(9)])
asyncio.run(main())
""",
    "a backward pass": """
class Node:
    def __init__(self, before): self.before, self.saved = before, hog(20 << 20)
    def backward(self):
        gradient = ct.empty(30 << 20, "u1")
        if self.before is not None: self.before.backward()
        return gradient
node = None
for _ in range(8): node = Node(node)
node.backward()
""",
    "a generator": """
def batches():
    while True: yield hog()
total = sum(one.size for one in batches())
""",
    "a context manager": """
import contextlib
@contextlib.contextmanager
def phase():
    try: yield
    finally: print("left")
with phase():
    while True: hog()
""",
    "another exception from it": """
try:
    while True: hog()
except ct.OutOfMemoryError as error:
    raise RuntimeError("training failed") from error
""",
    "an excepthook": """
import sys
sys.excepthook = lambda kind, error, tb: print("hook", kind.__name__)
while True: hog()
""",
    "at exit": """
import atexit
def leave():
    try:
        while True: hog()
    except ct.OutOfMemoryError: print("at exit")
atexit.register(leave)
""",
    "a memory fraction": """
ct.set_per_process_memory_fraction(0.6)
while True: hog()
""",
    "a private pool": """
pool = ct.MemPool()
with ct.use_mem_pool(pool):
    while True: hog()
""",
    "a side stream": """
with ct.stream(ct.Stream()):
    while True: hog()
""",
    "a handler of SIGALRM": """
import signal
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
while True: hog()
""",
    "a waiter for any child": """
import signal, os
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
signal.signal(signal.SIGCHLD, reap)
while True: hog()
""",
    "another directory": """
import os
os.mkdir("elsewhere"); os.chdir("elsewhere")
while True: hog()
""",
    "modules of its own beside it": """
for name in ("click", "numpy", "json"):
    open(name + ".py", "w").write("raise ImportError('the program has this name')")
while True: hog()
""",
    "os._exit": """
import os
try:
    while True: hog()
except ct.OutOfMemoryError: os._exit(9)
""",
    "no stderr": """
import os
os.close(2)
try:
    while True: hog()
except ct.OutOfMemoryError: print("still here")
""",
}


def _holder(text: str) -> str:
    """Return the call site that the report names first."""
    found = re.search(r"^Held when memory ran out\n.*\n(.*?)  ", text, re.MULTILINE)
    assert found is not None, text
    return found[1]


def _of_program(stderr: str) -> list[str]:
    """Return what the program wrote: of tracebacks its own frames, since those of threads vary, and the errors."""
    lines = stderr.partition("\nDevice ")[0].splitlines()
    return [line for line in lines if "big.py" in line or (line[:1].strip() and not line.startswith("cudatool: "))]


@pytest.mark.parametrize("name", _PROGRAMS)
def test_program_that_runs_out_of_memory_leaves_a_report_and_ends_as_without(name, run_warm, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + _PROGRAMS[name])
    plain = run_warm("run", "--no-on-oom", "--device", _DEVICE, "-o", "plain.ctrace", "big.py")
    if name == "another directory":
        (tmp_path / "elsewhere").rmdir()
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    text = (tmp_path / "run.oom.txt").read_text()
    assert text.startswith("Out of memory: big.py:")
    assert "(hog)" in _holder(text)
    assert (plain.returncode, plain.stdout) == (done.returncode, done.stdout)
    assert _of_program(plain.stderr) == _of_program(done.stderr)
    assert not (tmp_path / "plain.oom.txt").exists()


_PARENTS = {
    "multiprocessing, spawn": """
import multiprocessing
from hogs import work
if __name__ == "__main__":
    one = multiprocessing.get_context("spawn").Process(target=work); one.start(); one.join(); print(one.exitcode)
""",
    "multiprocessing, fork": """
import multiprocessing
from hogs import work
if __name__ == "__main__":
    one = multiprocessing.get_context("fork").Process(target=work); one.start(); one.join(); print(one.exitcode)
""",
    "subprocess": """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "from hogs import work; work()"], stderr=subprocess.DEVNULL).returncode)
""",
}


@pytest.mark.parametrize("name", _PARENTS)
def test_child_process_leaves_a_report_of_its_own(name, run_warm, tmp_path):
    (tmp_path / "hogs.py").write_text(
        f"def work():\n{'    '.join(('', *_HOG.strip().splitlines(True)))}\n    while True: hog()\n"
    )
    (tmp_path / "parent.py").write_text(_PARENTS[name])
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "parent.py")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    (report,) = tmp_path.glob("run.*.oom.txt")
    assert "(work.<locals>.hog)" in report.read_text() or "(hog)" in report.read_text()
    assert f"Wrote {report.name}" in done.stderr
    assert not (tmp_path / "run.oom.txt").exists()  # the parent had memory enough


def test_two_processes_that_run_out_leave_two_reports(run_warm, tmp_path):
    grows = "\ntry:\n    while True: hog()\nexcept ct.OutOfMemoryError: pass\n"
    ends = "if not child: os._exit(0)\nos.waitpid(child, 0)\n"
    (tmp_path / "big.py").write_text(f"import os\nchild = os.fork()\n{_HOG}{grows}{ends}")
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("*.oom.txt")]) == 2


def test_tests_that_run_out_of_memory_under_pytest(run_warm, tmp_path):
    (tmp_path / "test_big.py").write_text(_HOG + "def test_one():\n    while True: hog()\ndef test_two(): pass\n")
    words = ("-m", "pytest", "-q", *PLAIN_PYTEST, "-p", "no:cacheprovider", "-n", "0", "test_big.py")
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", *words)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "(hog)" in _holder((tmp_path / "run.oom.txt").read_text())


def test_trace_that_is_explained_names_the_libraries_of_the_program(run_command, tmp_path):
    (tmp_path / "cupy.py").touch()
    program = _HOG + "import os, cupy\ntry:\n    while True: hog()\nexcept ct.OutOfMemoryError: os.kill(os.getpid(), 9)"
    (tmp_path / "big.py").write_text(program)
    run_command("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py", cwd=tmp_path)
    assert ["CuPy"] == read(tmp_path / "run.ctrace").header["libraries"]


_CUPY = {
    "__init__": "from cupy import cuda",
    "cuda/__init__": """
import types
from cupy.cuda import memory
runtime = types.SimpleNamespace(getDevice=lambda: 0, memGetInfo=lambda: (FREE, 256 << 20))
""",
    "cuda/memory": """
class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"Out of memory allocating {size:,} bytes")
""",
}


@pytest.mark.parametrize(
    ("free", "limit", "reason"),
    [
        (6 << 20, 0, "The memory is full, the driver had 6 MiB free; 14 MiB more were needed for 20 MiB."),
        (90 << 20, 30 << 20, "The limit of CuPy's pool limits this program, the driver had 90 MiB free, and 20 MiB"),
    ],
    ids=["full", "limited"],
)
def test_failure_of_another_library_is_reported_although_the_program_catches_it(
    free, limit, reason, run_warm, run_here, tmp_path
):
    """With a stand-in for CuPy, which runs on a GPU only; its memory is that of the software device."""
    (tmp_path / "cupy" / "cuda").mkdir(parents=True)
    for name, text in _CUPY.items():
        (tmp_path / "cupy" / f"{name}.py").write_text(text.replace("FREE", str(free)))
    program = f"""
import cupy
hog()
def take():
    raise cupy.cuda.memory.OutOfMemoryError({20 << 20}, 0, {limit})
for _ in range(2):
    try: take()
    except MemoryError as error: print(error)
"""
    (tmp_path / "big.py").write_text(_HOG + program)
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    assert (done.returncode, done.stdout) == (0, "Out of memory allocating 20,971,520 bytes\n" * 2), done.stderr
    text = (tmp_path / "run.oom.txt").read_text()
    assert re.match(r"Out of memory: big\.py:\d+ \(take\) requested 20 MiB of CuPy on device 0\n", text), text
    assert reason in " ".join(text.split())
    assert "(hog)" in _holder(text)
    assert "_CONF" not in text  # no setting of our allocator changes what another one does
    (failure,) = json.loads(run_here("oom", "--json", "run.ctrace").stdout)["failures"]
    assert ("CuPy", 1, None) == (failure["library"], failure["later"], failure["settings"])


def test_reason_full_names_what_is_missing(run_warm, run_here, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + "hog(200 << 20); hog(150 << 20)")
    run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    (failure,) = json.loads(run_here("oom", "--json", "run.ctrace").stdout)["failures"]
    assert failure["why"] == "full"
    free_in_all = failure["free"] + failure["split"]["reserved"] - failure["split"]["active"]
    assert failure["missing"] == failure["size"] - free_in_all > 0
    assert failure["frames"][0]["function"] == "hog"


_FRAGMENTED = "for _ in range(25): hog(9 << 20)"  # two in a segment of 20 MiB, of which 2 MiB stay free


def test_reason_fragmented_names_the_setting_that_avoids_it_and_it_does(run_warm, run_here, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + _FRAGMENTED)
    assert run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py").returncode == 1
    (failure,) = json.loads(run_here("oom", "--json", "run.ctrace").stdout)["failures"]
    assert failure["why"] == "fragmented"
    conf = failure["settings"]["best"]["conf"]
    assert conf == "expandable_segments:True"
    assert f"CUDATOOL_ALLOC_CONF={conf}" in (tmp_path / "run.oom.txt").read_text().replace("\n", "")
    again = run_warm("run", "--device", _DEVICE, "big.py", environment={"CUDATOOL_ALLOC_CONF": conf})
    assert again.returncode == 0, again.stderr


def test_reason_limited_is_a_memory_fraction(run_warm, run_here, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + "ct.set_per_process_memory_fraction(0.25); hog(40 << 20); hog(40 << 20)")
    run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    (failure,) = json.loads(run_here("oom", "--json", "run.ctrace").stdout)["failures"]
    assert failure["why"] == "limited"
    assert failure["free"] >= failure["needed"]


_REASONS = {
    "larger": ("hog(300 << 20)", "larger", "The request is larger than the device, which has 256 MiB"),
    "pieces under a memory fraction": (
        """
ct.set_per_process_memory_fraction(0.5)
blocks = [ct.empty(6 << 20, "u1") for _ in range(18)][::3]
hog(50 << 20)""",
        "limited",
        "84 MiB of the reserved memory were free, in pieces of which this request could use 14 MiB.",
    ),
    "a graph's pool": (
        """
x = ct.zeros(20 << 20, "f4")
(x + x).sum()
ct.empty_cache()
graph = ct.CUDAGraph()
with ct.graph(graph): out = (x + x).sum()
while True: hog(40 << 20)""",
        "fragmented",
        "82 MiB: cached in another pool, which keeps it for its graph",
    ),
    "the driver's memory": (
        """
from cuda.bindings import driver
ct.empty(1, "u1")
def library(): return driver.cuMemAlloc(150 << 20)
library()
while True: hog(20 << 20)""",
        "full",
        "150 MiB of 250 MiB held by big.py",
    ),
}


@pytest.mark.parametrize("name", _REASONS)
def test_report_says_why_and_what_helps(name, run_warm, run_here, tmp_path):
    program, why, said = _REASONS[name]
    (tmp_path / "big.py").write_text(_HOG.replace("small =", "#") + program)
    assert run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py").returncode == 1
    assert said in " ".join((tmp_path / "run.oom.txt").read_text().split())
    (failure,) = json.loads(run_here("oom", "--json", "--budget", "0", "run.ctrace").stdout)["failures"]
    assert why == failure["why"]


def test_each_child_that_a_program_forks_before_it_uses_cuda_leaves_a_report(run_warm, tmp_path):
    work = "    ".join(("", *_HOG.strip().splitlines(True)))
    (tmp_path / "parent.py").write_text(f"""
import os
def work():
{work}
    while True: hog()
children = []
for _ in range(3):
    children.append(os.fork())
    if not children[-1]: work()
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
""")
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "parent.py")
    assert (done.returncode, done.stdout) == (0, "[1, 1, 1]\n"), done.stderr
    reports = [path.read_text() for path in tmp_path.glob("run.*.oom.txt")]
    assert 3 == len(reports)
    assert all("(hog)" in _holder(text) for text in reports)


def test_program_with_enough_memory_leaves_no_report_and_an_old_one_goes(run_warm, run_here, tmp_path):
    (tmp_path / "small.py").write_text(_HOG + "hog(1 << 20)")
    (tmp_path / "run.oom.txt").write_text("of an earlier run")
    refused = run_here("run", "--device", _DEVICE, "-o", "run.ctrace", "small.py")
    assert refused.returncode == 2
    assert "run.oom.txt" in refused.stderr
    assert run_warm("run", "-f", "--device", _DEVICE, "-o", "run.ctrace", "small.py").returncode == 0
    assert not (tmp_path / "run.oom.txt").exists()
    nothing = run_here("oom", "run.ctrace")
    assert (nothing.returncode, nothing.stdout) == (1, "")


def test_report_that_cannot_be_written_is_said_in_one_line(run_warm, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + "import sys; sys.executable = '/nowhere/python'\nwhile True: hog()")
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "its report" in line]
    assert line.startswith("cudatool: memory ran out; its report could not be written (No such file or directory)")
    assert line.endswith("run.ctrace explains it")


def test_settings_are_tried_until_the_budget_is_spent(run_warm, run_here, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + _FRAGMENTED)
    run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    (failure,) = json.loads(run_here("oom", "--json", "--budget", "0", "run.ctrace").stdout)["failures"]
    assert failure["settings"]["withheld"] == "too-long"
    text = run_here("oom", "--budget", "0", "run.ctrace")
    assert "the recording is long" in " ".join(text.stdout.split())
    assert "Next: cudatool oom run.ctrace" in text.stderr
    (whole,) = json.loads(run_here("oom", "--json", "run.ctrace").stdout)["failures"]
    assert whole["settings"]["untried"] == []


def test_snapshot_of_pytorch_is_explained_as_the_trace_is(run_warm, run_here, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + _FRAGMENTED)
    run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    assert run_here("snapshot", "--torch", "run.pickle", "run.ctrace").returncode == 0
    text = run_here("oom", "run.pickle").stdout
    assert text.startswith("Out of memory: big.py:5 (hog) requested 9 MiB on device 0\n")
    assert "process" not in text.partition("What to do")[0].replace("in process", "")
    facts = []
    for file in ("run.ctrace", "run.pickle"):
        (failure,) = json.loads(run_here("oom", "--json", file).stdout)["failures"]
        facts.append([failure[name] for name in ("why", "size", "needed", "free", "site")])
        facts[-1] += [failure["split"]["reserved"], failure["held"][0]["size"], failure["settings"]["best"]["conf"]]
    assert facts[0] == facts[1]


def test_blocks_from_when_the_history_was_off_have_the_lines_of_others_of_their_size(run_here, tmp_path):
    """A snapshot as an armed program writes it whose history was on for a part of the time."""

    def block(address: int, size: int, line: int) -> dict[str, object]:
        frames = [{"filename": "/home/me/train.py", "line": line, "name": f"f{line}"}] if line else []
        state = "active_allocated"
        return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}

    base, size = 0x7F0000000000, 4 << 20
    lines = [(size, 12), (size, 12), (size, 30), *[(size, 0)] * 5, (2 * size, 0)]
    at, blocks = base, []
    for taken, line in lines:
        blocks.append(block(at, taken, line))
        at += taken
    segment = {
        "device": 0,
        "address": base,
        "total_size": at - base,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }
    event = {"action": "oom", "size": 9 * size, "device_free": 1 << 20, "stream": 0, "time_us": 1, "frames": []}
    snapshot = {"segments": [segment], "device_traces": [[event]], "history_kept": 0.08}
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(snapshot))
    done = run_here("oom", tmp_path / "x.pickle", "--json")
    held = json.loads(done.stdout)["failures"][0]["held"]
    (like,) = (site for site in held if site["count"] == 5)
    assert {"label": "train.py:12 (f12)", "count": 2, "of": 3} == like["alike"]
    assert "history-off" == like["missing_stack"]
    assert [None, None] == [site["alike"] for site in held if site["stack"]]
    (alone,) = (site for site in held if site["size"] == 2 * size and not site["stack"])
    assert alone["alike"] is None  # no other block has its size
    text = " ".join(run_here("oom", tmp_path / "x.pickle").stdout.split())
    assert "(no stack: PyTorch's history was off), 4 MiB each [2 of 3 with" in text
    assert "parameters or optimizer state" not in text
    assert "on for 8.0 % of the time" in run_here("snapshot", tmp_path / "x.pickle").stdout


def test_recording_without_a_failure_has_nothing_to_explain(run_here):
    data = Path(__file__).resolve().parents[1] / "data"
    for path in sorted(data.glob("*.pickle.xz")):
        done = run_here("oom", path)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert "No allocation failed in" in done.stderr


def test_uncached_memory_that_runs_out_is_reported(run_warm, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + "ct.caching_allocator_enable(False)\nwhile True: hog()")
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    assert done.returncode == 1
    assert "(hog)" in _holder((tmp_path / "run.oom.txt").read_text())


def test_explaining_process_is_no_child_of_the_program(run_warm, tmp_path):
    (tmp_path / "big.py").write_text(_HOG + "while True: hog()")
    run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    code = "from cudatool.trace import read, Kind; print(len(read('run.ctrace').of_kind(Kind.CHILD_PROCESS)))"
    done = run_python(code, folder=tmp_path)
    assert done.stdout == "0\n"


def test_example_of_the_page_prints_what_the_page_shows(run_warm, tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "out-of-memory.md").read_text()
    program, console = re.findall(r"```(?:python|console)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "layers.py").write_text(program)
    run_warm("run", "--device", "sim:memory=256MiB", "-o", "layers.ctrace", "layers.py")
    report = " ".join((tmp_path / "layers.oom.txt").read_text().split())
    shown = console.partition("layers.oom.txt\n")[2].split("...")
    assert len(shown) > 2
    for part in filter(None, (" ".join(part.split()) for part in shown)):
        assert part in report


def test_a_setting_that_would_exceed_the_budget_is_not_tried(monkeypatch):
    """If it took as long as the longest one so far, 0.3 s."""
    oom = importlib.import_module("cudatool.cli.oom")
    times = iter([0.0, 0.1, 0.4, 0.6, 0.8])
    monkeypatch.setattr(oom, "process_time", lambda: next(times))
    budget = oom._Budget(1.0)
    assert [False, False, False, True] == [budget.is_spent() for _ in range(4)]


_OF_THE_DRIVER = """
from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions
device = Device()
device.set_current()
stream = device.create_stream()
kept = []
def hog(resource):
    while True: kept.append(resource.allocate(60 << 20, stream=stream))
"""


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("hog(device.memory_resource)", "The memory is full, the driver had 16 MiB free; 44 MiB more were needed"),
        (
            "hog(DeviceMemoryResource(device, DeviceMemoryResourceOptions(max_size=128 << 20)))",
            "The limit of the CUDA driver's pool limits this program, the driver had 136 MiB free",
        ),
    ],
)
def test_memory_of_the_driver_that_runs_out_is_explained(run_warm, tmp_path, call, reason):
    (tmp_path / "big.py").write_text(_OF_THE_DRIVER + call)
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    assert (done.returncode, "1 failed: out of memory" in " ".join(done.stderr.split())) == (1, True), done.stderr
    report = (tmp_path / "run.oom.txt").read_text()
    assert "big.py:8 (hog) requested 60 MiB of the CUDA driver on device 0" in report
    assert reason in " ".join(report.split())
    assert "(hog)" in _holder(report)


def test_memory_of_the_host_that_runs_out_is_no_failure_of_the_device(run_warm, tmp_path):
    (tmp_path / "big.py").write_text(
        "from cuda.bindings import driver\nfrom cuda.core import Device\nDevice().set_current()\n"
        "print(driver.cuMemAllocHost(1 << 60)[0].name)\n"
    )
    done = run_warm("run", "--device", _DEVICE, "-o", "run.ctrace", "big.py")
    assert "OUT_OF_MEMORY" in done.stdout
    assert not (tmp_path / "run.oom.txt").exists()


_HOLDS = """
import cudatool as ct
from cudatool.trace import hooks
from cudatool.trace.events import FREE_UNKNOWN, Kind
ct.empty(1)
def load():
    hooks.emit(Kind.POOL_HELD, device=0, name="JAX", size=3 << 20, aux0=2, correlation=hooks.new_correlation())
hooks.emit(Kind.LIBRARY_OOM, device=0, name="JAX", size=1 << 40, flags=FREE_UNKNOWN)
load()
"""


def test_lines_that_hold_a_librarys_arrays_are_in_the_report_and_the_snapshot(run_warm, run_here, tmp_path):
    (tmp_path / "job.py").write_text(_HOLDS)
    assert run_warm("run", "-o", "job.ctrace", "job.py").returncode == 0
    for command in ("oom", "snapshot"):
        text = run_here(command, "job.ctrace").stdout
        table = text.partition("Arrays of JAX on device 0, at the largest of its reports\n")[2].splitlines()
        assert ["job.py:7", "(load)", "2", "3", "MiB"] == table[1].split(), text
        assert "3 MiB together" == table[2].strip()
        blocks = json.loads(run_here(command, "--json", "job.ctrace").stdout)
        (found,) = blocks["failures" if command == "oom" else "library_blocks"]
        (found,) = found["library_blocks"] if command == "oom" else (found,)
        assert ("JAX", 3 << 20, None) == (found["library"], found["size"], found["most"])
