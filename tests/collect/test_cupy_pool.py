"""What a recording has of CuPy's memory pool, from hooks as CuPy calls them (native/fake_cupy.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).with_name("native")


@pytest.fixture
def run(libcupti, tmp_path):
    """Run a program after that, and return what it printed."""

    def run(program: str) -> str:
        path = tmp_path / "program.py"
        path.write_text("import sys, threading\nfrom pooled import *\ncuda, driver = prepare(sys.argv[1])\n" + program)
        environment = {**os.environ, "PYTHONPATH": str(_HERE)}
        command = [sys.executable, path, libcupti]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        return done.stdout

    return run


def test_blocks_have_their_sizes_their_device_and_the_line_that_asked_for_them(run):
    printed = run("""
with recorded() as events:
    block = cuda.pool.malloc(1000)
    cuda.pool.free(block)
taken, made, gone = events
print(taken.kind.name, taken.size, made.kind.name, made.address == taken.address, made.size, made.aux0, made.name)
print(made.device, lines(made, __file__), gone.kind.name, gone.address == made.address, gone.size, gone.name)
print(made.thread == hooks.thread_id(), taken.time <= made.time <= gone.time)
""")
    assert [
        "MEM_ALLOC 1024 POOL_ALLOC True 1024 1000 CuPy",
        "0 [6] POOL_FREE True 1024 CuPy",
        "True True",
    ] == printed.splitlines()


POOL = """
import random
from cudatool.trace.lifetimes import blocks, segments
draw, held, said = random.Random({seed}), {{}}, []
def step(stream):
    if held and draw.random() < 0.45:
        cuda.pool.free(held.popitem()[0])
    else:
        held[cuda.pool.malloc(draw.choice([1, 512, 700, 3000, 40_000]), stream)] = True
    if draw.random() < 0.05:
        cuda.pool.free_all_blocks()
def work(stream):
    for _ in range(100):
        step(stream)
with recorded() as events:
    for stream in (0, 7):
        thread = threading.Thread(target=work, args=(stream,))
        thread.start(); thread.join()
    step(0)
found = trace_of(events)
live, taken = blocks(found).at(len(events) - 1), segments(found).at(len(events) - 1)
print(int(live.size.sum()) == cuda.pool.used_bytes(), int(taken.size.sum()) == cuda.pool.total_bytes())
print(sorted(live.address.tolist()) == sorted(held), set(live.library.tolist()) == {{1}})
"""


@pytest.mark.parametrize("seed", range(5))
def test_blocks_and_chunks_are_those_of_the_pool_at_the_end_with_two_threads_and_streams(run, seed):
    assert "True True\nTrue True\n" == run(POOL.format(seed=seed))


def test_what_a_thread_without_the_hook_freed_ends_when_it_is_handed_out_again(run):
    printed = run("""
from cudatool.trace.lifetimes import blocks
ready, go = threading.Event(), threading.Event()
def frees():
    go.wait()
    cuda.pool.free(block)
thread = threading.Thread(target=frees)
thread.start()  # before the recording
with recorded() as events:
    block = cuda.pool.malloc(4096)
    go.set(); thread.join()
    parts = [cuda.pool.malloc(512), cuda.pool.malloc(512)]
rows = blocks(trace_of(events))
print(rows.size.tolist(), rows.end.tolist(), len(events))
""")
    assert "[4096, 512, 512] [2, 4, 4] 4\n" == printed


def test_an_allocation_that_fails_is_no_block(run):
    printed = run("""
with recorded() as events:
    driver.fails = True
    try:
        cuda.pool.malloc(1000)
    except MemoryError as error:
        print(error)
    print(cuda.pool.malloc(0))
print(len(events))
""")
    assert "out of memory\n0\n0\n" == printed


def test_the_programs_own_hooks_are_called_as_without_a_recording(run):
    printed = run("""
calls = []
class Own(cuda.MemoryHook):
    name = "own"
    def malloc_postprocess(self, **facts):
        calls.append(facts["size"])
    def free_preprocess(self, **facts):
        raise ValueError("the program's")
with Own():
    with recorded() as events:
        block = cuda.pool.malloc(10)
        try:
            cuda.pool.free(block)
        except ValueError as error:
            print(error)
        with Own.__new__(type("Inner", (Own,), {"name": "inner"})):
            cuda.pool.malloc(20)
    print(list(cuda.get_memory_hooks()), calls)
print(list(cuda.get_memory_hooks()))
""")
    assert "the program's\n['own'] [10, 20, 20]\n[]\n" == printed


def test_threads_keep_the_profile_function_that_they_would_have_had(run):
    printed = run("""
seen = []
def profile(frame, event, argument):
    if frame.f_code.co_name == "work" and event in ("call", "return"):
        seen.append(event)
def work():
    cuda.pool.malloc(1)
    print(sys.getprofile() is expected)
def start():
    thread = threading.Thread(target=work)
    thread.start(); thread.join()
expected = None
with recorded() as events:
    start()
print(threading.getprofile(), len([one for one in events if one.kind == ALLOC]))
expected = profile
threading.setprofile(profile)
with recorded() as events:
    start()
print(threading.getprofile() is profile, seen, len([one for one in events if one.kind == ALLOC]))
with recorded() as events:
    threading.setprofile(None)  # the program's own wish
expected = None
start()
print(threading.getprofile())
""")
    assert ["True", "None 1", "True", "True ['call', 'return'] 1", "True", "None"] == printed.splitlines()


def test_a_thread_that_outlives_a_recording_is_seen_by_the_next_one_and_by_none_in_between(run):
    printed = run("""
import queue
asked, done = queue.Queue(), queue.Queue()
def work():
    while asked.get():
        done.put(cuda.pool.malloc(1))
def one():
    asked.put(True); done.get()
with recorded() as first:
    thread = threading.Thread(target=work)
    thread.start()
    one()
one()
with recorded() as second:
    one()
asked.put(False); thread.join()
print([len([one for one in events if one.kind == ALLOC]) for events in (first, second)])
""")
    assert "[1, 1]\n" == printed


def test_a_cupy_that_is_imported_while_recording_is_seen_from_then_on(run):
    printed = run("""
import importlib, pathlib, tempfile
del sys.modules["cupy"], sys.modules["cupy.cuda"]
temporary = tempfile.TemporaryDirectory()
folder = pathlib.Path(temporary.name)
(folder / "cupy" / "cuda").mkdir(parents=True)
(folder / "cupy" / "__init__.py").write_text("from cupy import cuda\\n")
(folder / "cupy" / "cuda" / "__init__.py").write_text(
    "import sys\\nreal = sys.modules['__main__'].cuda\\nMemoryHook, pool = real.MemoryHook, real.pool\\n")
sys.path.insert(0, str(folder))
with recorded() as events:
    import cupy
    cupy.cuda.pool.malloc(5)
print([event.kind.name for event in events])
""")
    assert "['MEM_ALLOC', 'POOL_ALLOC']\n" == printed


def test_a_cupy_without_hooks_is_said_not_to_be_watched(run):
    printed = run("""
import logging
logging.disable()
del cuda.MemoryHook
with recorded() as events:
    cuda.pool.malloc(5)
print([event.kind.name for event in events], events[0].name)
""")
    assert "no MemoryHook" in printed and "['WARNING', 'MEM_ALLOC']" in printed
