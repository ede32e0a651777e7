from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "samples"
RECORDING = ROOT / "tests" / "data" / "streams_default.pickle.xz"
SOUND = ("mlp",)
TOO_SHORT = ("fragmentation", "vector_add")


def test_the_sample_that_leaks_is_found_with_its_line(run_warm, tmp_path: Path) -> None:
    run_warm("run", "-o", "leak.ctrace", SAMPLES / "leak.py")
    done = run_warm("leaks", "leak.ctrace")
    assert 1 == done.returncode
    line = next(number for number, text in enumerate(SAMPLES.joinpath("leak.py").read_text().splitlines(), 1)
                if "ct.zeros" in text)  # fmt: skip
    assert f"leak.py:{line} (<module>)" in done.stdout
    assert "+1 MiB" in done.stdout
    assert "49 of 49" in done.stdout
    assert [] == [text for text in done.stdout.splitlines() if len(text) > 80]


@pytest.mark.parametrize("sample", SOUND)
def test_the_other_samples_do_not_leak(run_warm, sample: str) -> None:
    run_warm("run", "-o", "sound.ctrace", SAMPLES / f"{sample}.py")
    done = run_warm("leaks", "sound.ctrace")
    assert (0, "") == (done.returncode, done.stderr)
    assert "no call site leaks" in done.stdout


@pytest.mark.parametrize("sample", TOO_SHORT)
def test_a_sample_in_which_nothing_repeats_is_not_called_clean(run_warm, sample: str) -> None:
    run_warm("run", "-o", "short.ctrace", SAMPLES / f"{sample}.py")
    done = run_warm("leaks", "short.ctrace")
    assert (4, "") == (done.returncode, done.stderr)
    assert "could not tell whether anything leaks" in done.stdout
    assert "No repeated steps found. Wrap each iteration" in " ".join(done.stdout.split())
    (device,) = json.loads(run_warm("leaks", "short.ctrace", "--json").stdout)["devices"]
    assert ("could not tell", "nothing-repeats", [], []) == tuple(
        device[key] for key in ("verdict", "doubt", "leaks", "unclear")
    )


def test_a_recording_without_device_memory_is_not_called_clean(run_warm, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("")
    run_warm("run", "-o", "idle.ctrace", "idle.py")
    done = run_warm("leaks", "idle.ctrace")
    assert (4, "Could not tell: no device memory was allocated.\n") == (done.returncode, done.stdout)
    assert 4 == run_warm("leaks", "idle.ctrace", "--json").returncode
    shown = run_warm("snapshot", "idle.ctrace")
    assert (0, "") == (shown.returncode, shown.stderr)
    assert "no device memory was allocated" in shown.stdout
    checked = run_warm("sanitize", "idle.ctrace")
    assert 2 == checked.returncode
    assert "0 operations" not in checked.stdout.splitlines()[-1]


PINNED = """
import cudatool as ct
kept, first = [], [ct.empty_pinned(1 << 20, "u1") for _ in range(30)]
import contextlib
for turn in range(40):
    with {step}:
        x = ct.ones(1 << 10, "f4")
        batch = ct.empty_pinned(1 << 16, "u1")
        kept.append(ct.empty_pinned(1 << 20, "u1"))
        del kept[: {freed}]
        (x + 1).get()
"""


@pytest.mark.parametrize("step", ["ct.range('step')", "contextlib.nullcontext()"], ids=["named", "not named"])
@pytest.mark.parametrize(("freed", "status"), [(0, 1), (-4, 0)], ids=["kept", "four at a time"])
def test_pinned_memory_that_each_step_keeps_is_a_leak(run_warm, tmp_path: Path, step, freed: int, status: int) -> None:
    program = PINNED.format(step=step, freed=freed)
    (tmp_path / "a.py").write_text(program)
    assert 0 == run_warm("run", "-o", "a.ctrace", "a.py").returncode
    done = run_warm("leaks", "a.ctrace")
    assert (status, "") == (done.returncode, done.stderr), done.stdout
    assert "Device 0: no call site leaks" in done.stdout
    title = "1 call site leaks" if status else "no call site leaks"
    assert f"Pinned host memory: {title}" in done.stdout
    line = next(number for number, text in enumerate(program.splitlines(), 1) if "kept.append" in text)
    assert bool(status) == (f"a.py:{line} (<module>)" in done.stdout)
    pinned = json.loads(run_warm("leaks", "a.ctrace", "--json").stdout)["pinned"]
    assert ["leaks" if status else "no growth", status] == [pinned["verdict"], len(pinned["leaks"])]


def test_pinned_memory_is_null_where_there_is_none(run_warm) -> None:
    run_warm("run", "-o", "leak.ctrace", SAMPLES / "leak.py")
    assert json.loads(run_warm("leaks", "leak.ctrace", "--json").stdout)["pinned"] is None


PHYSICAL = """
import sys
from cuda.bindings import driver
import cudatool as ct

ct.init()
props = driver.CUmemAllocationProp()
props.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
for _ in range(20):
    with ct.range("step"):
        ct.empty(8, "f4")
        _, handle = driver.cuMemCreate(2 << 20, props, 0)
        driver.cuMemRelease(handle)
_, kept = driver.cuMemCreate(2 << 20, props, 0)
if sys.argv[1:]:
    driver.cuMemRelease(kept)
"""


@pytest.mark.parametrize(("arguments", "now", "status"), [([], "2 MiB", 4), (["release"], "0 B", 0)])
def test_memory_without_an_address_is_named_as_not_counted(
    run_warm, tmp_path: Path, arguments: list[str], now: str, status: int
) -> None:
    (tmp_path / "a.py").write_text(PHYSICAL)
    recorded = run_warm("run", "-o", "a.ctrace", "a.py", *arguments)
    expected = f"not counted: memory from cuMemCreate on device 0, 2 MiB at its highest and {now} at the end"
    expected += ", most of it from a.py:13 (<module>)"
    assert expected in " ".join(recorded.stderr.split())
    assert f"warning: {expected}" in " ".join(run_warm("snapshot", "a.ctrace").stdout.split())
    done = run_warm("leaks", "a.ctrace", "--json")
    assert (status, ["memory from cuMemCreate"]) == (done.returncode, json.loads(done.stdout)["not_looked_at"])


STEPS = """
import subprocess, sys
import cudatool as ct

for _ in range(20):
    with ct.range("step"):
        ct.zeros(8)
if sys.argv[1:]:
    subprocess.run([sys.executable, __file__], check=True)
"""


def test_what_is_missing_of_a_recording_is_not_called_free_of_leaks(run_warm, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(STEPS)
    run_warm("run", "-o", "a.ctrace", "a.py")
    assert (0, []) == _left_out(run_warm)
    whole = (tmp_path / "a.ctrace").read_bytes()
    (tmp_path / "a.ctrace").write_bytes(whole[: len(whole) * 9 // 10])
    assert (4, ["the rest of the recording: the file ends early"]) == _left_out(run_warm)


def test_a_process_whose_trace_cannot_be_read_is_not_called_free_of_leaks(run_warm, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(STEPS)
    run_warm("run", "-o", "a.ctrace", "a.py", "child")
    assert (0, []) == _left_out(run_warm)
    (child,) = tmp_path.glob("a.*.ctrace")
    whole = child.read_bytes()
    said = f"process {child.name.split('.')[1]}, as {child.name} is missing or cannot be read"
    child.write_bytes(whole.replace(b"{", b"}", 1))
    assert (4, [said]) == _left_out(run_warm)
    child.unlink()
    assert (4, [said]) == _left_out(run_warm)
    assert f"Not looked at: {said}." in " ".join(run_warm("leaks", "a.ctrace").stdout.split())
    assert f"warning: not looked at: {said}" in " ".join(run_warm("snapshot", "a.ctrace").stderr.split())


def _left_out(run) -> tuple[int, list[str]]:
    done = run("leaks", "--json", "a.ctrace")
    return done.returncode, json.loads(done.stdout)["not_looked_at"]


def test_json_tells_steps_and_leaks_in_bytes(run_warm) -> None:
    run_warm("run", "-o", "leak.ctrace", SAMPLES / "leak.py")
    done = run_warm("leaks", "leak.ctrace", "--json")
    assert 1 == done.returncode
    document = json.loads(done.stdout)
    assert "cudatool.leaks/1" == document["schema"]
    (device,) = document["devices"]
    (leak,) = device["leaks"]
    # 50 steps, each of which keeps 1 MiB; the first is left out.
    assert (1 << 20, 49, 49, None) == (leak["per_step"], leak["grew"], leak["steps"], leak["doubt"])
    assert (49 << 20, 50 << 20) == (leak["growth"], leak["live"])
    assert {"count", "source", "confidence"} == device["steps"].keys()


def test_the_newest_trace_is_the_default(run_warm) -> None:
    run_warm("run", "-o", "leak.ctrace", SAMPLES / "leak.py")
    assert 1 == run_warm("leaks").returncode


PROGRAMS = {
    "service": """
import threading
import numpy as np
import cudatool as ct
answers = {}
def serve(first):
    for number in range(first, first + 20):
        question = ct.asarray(np.full(1000 + number, 2, np.float32))
        answers[number] = question, ct.ops.sigmoid(question)
        answers[number][1].get()
threads = [threading.Thread(target=serve, args=(100 * i,)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
    "main": """
import numpy as np
import cudatool as ct
def main():
    weights, losses = ct.zeros(1 << 16, np.float32), []
    for i in range(60):
        output = ct.ops.relu(weights)
        if i % 4 == 0:
            losses.append(ct.ops.sigmoid(output))
main()
""",
    "layers": """
import numpy as np
import cudatool as ct
layers = [ct.asarray(np.ones(1 << 12, np.float32)) for _ in range(40)]
""",
    "tokens": """
import numpy as np
import cudatool as ct
weights = ct.zeros(1 << 12, np.float32)
def generate(tokens):
    keys = []
    for token in range(tokens):
        query = ct.ops.relu(weights)
        keys.append(ct.ops.sigmoid(query))
        scores = ct.zeros(len(keys) * 1000, np.float32)
    return query.get()
generate(60)
""",
    "ring": """
import numpy as np
import cudatool as ct
weights, ring = ct.zeros(1 << 12, np.float32), []
for i in range(80):
    with ct.range("step"):
        ring.append(ct.ops.sigmoid(ct.ops.relu(weights)))
        if len(ring) > 30: ring.pop(0)
""",
}


@pytest.mark.parametrize(("name", "status"), [("service", 1), ("main", 1), ("layers", 4), ("tokens", 4), ("ring", 0)])
def test_whole_programs(run_warm, tmp_path: Path, name: str, status: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    assert 0 == run_warm("run", "-o", "t.ctrace", "program.py").returncode
    done = run_warm("leaks", "t.ctrace")
    assert (status, "") == (done.returncode, done.stderr), done.stdout


@pytest.mark.parametrize("arguments", [["missing.ctrace"], [], ["text"]])
def test_what_cannot_be_read_is_one_line_and_status_2(run_warm, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "text").write_text("text")
    done = run_warm("leaks", *arguments)
    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
