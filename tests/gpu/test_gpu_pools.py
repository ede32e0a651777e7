"""What a recording on a GPU has of the memory pools of CuPy and JAX, in programs that know nothing of cudatool."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from gpu_recordings import record

from cudatool._driver import gpu_names
from cudatool.analyze import report
from cudatool.trace import reader
from cudatool.trace.events import LIVED, Kind
from cudatool.trace.lifetimes import blocks, segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

# No thread works at the moments that are said.
CUPY = """
import json, sys, threading
import cupy as cp
pool, said = cp.get_default_memory_pool(), []

def say(moment):
    cp.cuda.Device().synchronize()
    said.append([moment, pool.used_bytes(), pool.free_bytes(), pool.total_bytes()])

def keep(count, stream):
    with stream:
        return [cp.zeros(1000 * (number + 1), cp.float32) for number in range(count)]  # KEEP

def work(out, stream):
    with stream:
        for _ in range(20):
            cp.ones((300, 300)).sum()  # DROP
    out.append(keep(7, stream))

streams = [cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)]
kept = [[], []]
threads = [threading.Thread(target=work, args=pair) for pair in zip(kept, streams)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
big = cp.zeros((2048, 2048), cp.float32)  # BIG
say("peak")
del big
kept[0].clear()
say("less")
pool.free_all_blocks()
say("released")
json.dump(said, open("said.json", "w"))
"""


def last_line_of(program: str, mark: str) -> int:
    return next(number for number, line in enumerate(program.splitlines(), 1) if line.endswith(f"# {mark}"))


def levels(trace) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes in CuPy's blocks and in its chunks after each record."""
    found = []
    for rows in (blocks(trace), segments(trace)):
        rows = rows[rows.library != 0]
        delta = np.zeros(len(trace.records) + 1, np.int64)
        np.add.at(delta, rows.start, rows.size)
        np.subtract.at(delta, rows.end, rows.size)
        found.append(np.cumsum(delta))
    return found[0], found[1]


def test_cupys_blocks_are_its_pools_to_the_byte_on_two_threads_and_streams(tmp_path):
    trace, _ = record(tmp_path, CUPY, "cupy")
    used, taken = levels(trace)
    for moment, in_use, free, total in json.loads((tmp_path / "said.json").read_text()):
        at = np.flatnonzero((used == in_use) & (taken == total))
        assert len(at), f"at no moment as {moment}: {in_use} used of {total}"
        assert int((taken - used)[at[-1]]) == free
    peak = json.loads((tmp_path / "said.json").read_text())[0]
    assert int(used.max()) >= peak[1]
    live = blocks(trace).at(int(np.flatnonzero((used == peak[1]) & (taken == peak[3]))[-1]))
    by_line: dict[int, list[int]] = {}
    for stack, size in zip(live.stack[live.library != 0].tolist(), live.size[live.library != 0].tolist(), strict=True):
        lines = [frame.line for frame in trace.stack(stack) if frame.file.endswith("program.py")]
        by_line.setdefault(lines[0], []).append(size)
    assert by_line.pop(last_line_of(CUPY, "BIG")) == [2048 * 2048 * 4]
    sizes = [-(-4000 * (number + 1) // 512) * 512 for number in range(7)]
    assert sorted(by_line.pop(last_line_of(CUPY, "KEEP"))) == sorted(2 * sizes)
    assert not by_line


def test_the_ledger_has_cupys_blocks_and_its_cache(tmp_path):
    trace, _ = record(tmp_path, CUPY.replace('say("peak")', 'say("peak"); import time; time.sleep(0.4)'), "cupy")
    (ledger,) = [one for one in report(trace).ledgers if one is not None]
    lines = {line.words: line.size for line in ledger.lines}
    assert ("CuPy", "taken from the driver") not in lines
    _, used, free, _ = json.loads((tmp_path / "said.json").read_text())[0]
    assert lines["CuPy", "blocks in use"] + lines["CuPy", "cached"] == used + free
    assert ledger.named > 0.98


BOTH = """
import json
import cupy as cp, torch
kept = []
for number in range(1, 30):
    kept.append(torch.empty(100_000 * number, device="cuda"))
    arrays = [cp.zeros(70_000 * number) for _ in range(3)]
    if number % 3 == 0:
        del kept[0]
torch.cuda.synchronize()
json.dump({"torch": torch.cuda.memory_stats()["requested_bytes.all.current"], "reserved": torch.cuda.memory_reserved(),
           "cupy": cp.get_default_memory_pool().used_bytes(), "total": cp.get_default_memory_pool().total_bytes()},
          open("said.json", "w"))
import time
time.sleep(0.5)
import os
os._exit(0)
"""


def test_beside_cupy_the_replay_of_pytorchs_allocator_stays_exact_and_both_are_named(tmp_path):
    pytest.importorskip("torch")
    trace, _ = record(tmp_path, BOTH, "cupy")
    said = json.loads((tmp_path / "said.json").read_text())
    live, held = blocks(trace).at(len(trace.records) - 1), segments(trace).at(len(trace.records) - 1)
    kinds, taken = trace.records["kind"][live.start], trace.records["kind"][held.start]
    asked = trace.records["aux0"][live.start]  # PyTorch's own sizes count what it does not split off
    assert int(asked[kinds == Kind.BLOCK_ALLOC].sum()) == said["torch"]
    assert int(held.size[taken == Kind.SEGMENT_ALLOC].sum()) == said["reserved"]
    assert int(live.size[live.library != 0].sum()) == said["cupy"]
    assert int(held.size[held.library != 0].sum()) == said["total"]
    command = [sys.executable, "-m", "cudatool", "replay", "--check", "t.ctrace"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (ledger,) = [one for one in report(trace).ledgers if one is not None]
    owners = {line.words for line in ledger.lines}
    assert {("CuPy", "blocks in use"), ("PyTorch", "blocks in use")} <= owners


HOOKED = """
import threading
import cudatool, cupy as cp
seen = []

class Own(cp.cuda.MemoryHook):
    name = "own"
    def malloc_postprocess(self, **facts):
        seen.append(facts["mem_size"])

def work():
    with Own():
        cp.zeros(1000)

def run():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()

held = cp.zeros(2000)
with cudatool.record("t.ctrace", device="cuda"):
    run()
    more = cp.zeros(5000, cp.float32)
run()
assert seen == [8192] * 4, seen
assert threading.getprofile() is None
with cudatool.record("u.ctrace", device="cuda"):
    run()
"""


def test_a_recording_inside_of_a_program_sees_blocks_and_the_programs_own_hooks_work(tmp_path):
    pytest.importorskip("cupy")
    (tmp_path / "program.py").write_text(HOOKED)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = reader.read(tmp_path / "t.ctrace"), reader.read(tmp_path / "u.ctrace")
    for trace, lived, taken in ((first, [16384], [8192, 8192, 20480]), (second, [16384, 20480], [8192, 8192])):
        blocks_taken = trace.of_kind(Kind.POOL_ALLOC)
        was_there = blocks_taken["flags"] & LIVED != 0
        assert lived == sorted(blocks_taken["size"][was_there].tolist())
        assert taken == blocks_taken["size"][~was_there].tolist()


JAX = """
import json, os, time
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "PRE"
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.05"  # other tests use the GPU, too
import jax, jax.numpy as jnp
x = jnp.ones((1024, 1024))
y = jax.jit(lambda x: jnp.tanh(x @ x))(x)
y.block_until_ready()
time.sleep(0.5)
json.dump(jax.devices()[0].memory_stats(), open("said.json", "w"))
time.sleep(0.5)
"""


@pytest.mark.parametrize("preallocates", ["true", "false"])
def test_jax_in_use_is_what_its_memory_statistics_say(tmp_path, preallocates):
    trace, _ = record(tmp_path, JAX.replace("PRE", preallocates), "jax")
    said = json.loads((tmp_path / "said.json").read_text())
    use = trace.of_kind(Kind.POOL_USE)
    assert len(use), "JAX was not asked"
    assert {trace.names[name] for name in use["name"].tolist()} == {"JAX"}
    last = use[-1]
    found = (int(last["size"]), int(last["aux0"]), int(last["aux1"]))
    assert found == (said["bytes_in_use"], said["peak_bytes_in_use"], said["bytes_limit"])
    (ledger,) = [one for one in report(trace).ledgers if one is not None]
    lines = {line.words: line.size for line in ledger.lines if line.owner == "JAX"}
    assert ("JAX", "taken from the driver") not in lines
    assert lines["JAX", "blocks in use"] in use["size"].tolist()


JAX_HOLDS = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import collections, time
import jax, jax.numpy as jnp
from cudatool.trace import hooks
from cudatool.trace.events import Kind
counts = collections.defaultdict(list)  # by profile
hooks.subscribe(lambda e: counts[e.correlation].append(e.aux0) if e.kind == Kind.POOL_HELD else None)
def load(count):
    return [jnp.ones((1024, 1024)) + number for number in range(count)]
def work(x):
    return jax.jit(lambda x: x @ x)(x)
held = load(8)
product = work(held[0])
jax.block_until_ready((held, product))
deadline = time.monotonic() + 90  # a profile is made for at most 1 % of the time: how long it took, the machine says
while sum(counts[max(counts, default=0)]) < 9 and time.monotonic() < deadline: time.sleep(0.1)
del held
"""


def test_jax_arrays_have_the_lines_that_made_them_when_most_were_held(tmp_path):
    trace, _ = record(tmp_path, JAX_HOLDS, "jax")
    (found,) = report(trace).summary.library_blocks
    assert ("JAX", 0) == (found.library, found.device) and found.size <= (found.most or 0)
    held = Counter[str]()  # JAX's own frames differ from the first call to the others
    for site in found.sites:
        held[site.label.partition(" ")[0]] += site.count
        assert site.size == site.count << 22
    assert {"program.py:11": 8, "program.py:13": 1} == dict(held)


def test_jax_that_uses_no_device_is_not_started(tmp_path):
    trace, _ = record(tmp_path, "import jax, time\ntime.sleep(0.5)\n", "jax")
    assert not len(trace.of_kind(Kind.POOL_USE)) and not len(trace.of_kind(Kind.MEM_ALLOC))
