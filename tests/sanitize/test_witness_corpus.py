"""Programs without races give the same bytes in every legal order: of the ordering rules and of the replay at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_process import run_python

RACES = Path(__file__).resolve().parents[1] / "races"
PROGRAMS = [  # those with more than one order
    "block_across_threads",
    "block_recorded_for_one_of_two_streams",
    "block_reused_without_record_stream",
    "columns_of_a_view",
    "copies_of_overlapping_ranges",
    "double_buffer",
    "event_across_devices",
    "event_destroyed_after_wait",
    "event_recorded_again",
    "graph_builder_branches",
    "graph_updated",
    "kernels_on_interleaved_elements",
    "legacy_of_two_devices",
    "legacy_wait_is_an_action",
    "memset_of_columns",
    "peer_copy",
    "pinned_halves",
    "stream_ordered_reuse",
    "streams_reads_only",
    "sync_copy_in_waits_for_its_stream",
]
_RUNNER = """
import gc, json, os, random, sys, tempfile, time
sys.path[:0] = [os.environ["RACES"], os.environ["RACES"] + "/programs"]
import cudatool as ct
from cudatool.runtime import host_function
from cudatool.recording import record
from cudatool.sanitize.search import Search
from cudatool.sanitize.witness import apart
from cudatool.sim.observe.tape import Tape
from cudatool.trace.reader import read
from race_corpus import programs

host_function.repeatable = True
results = {}

def outcomes():
    search = Search(trace, tape)
    search.check_itself()
    expected = search.replay(search.steps.program_order())
    orders = {tuple(search.steps.any_order(random.Random(seed))) for seed in range(6)}
    yield len(orders), [order for order in orders if search.replay(list(order)) != expected]

for program in programs():
    if program.name not in sys.argv[1:]:
        continue
    clean = next(variant for variant, expected in program.expect.items() if not expected)
    sys.argv, arguments = [str(program.path), clean], sys.argv
    tape = Tape()
    tape.again[host_function.address] = host_function.repeat
    scope = {"__name__": "__main__", "__file__": str(program.path)}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.ctrace")
        with record(path, measure_accesses=True, tape=tape):
            exec(program.code, scope)
        trace = read(path)
    sys.argv = arguments
    tape.prepare()
    results[program.name] = tape.refusal or list(apart(tape, outcomes, time.monotonic() + 60))
    scope.clear()
    gc.collect()
    ct.synchronize()
    ct.empty_cache()
    ct.empty_host_cache()
json.dump(results, sys.stdout)
"""


@pytest.mark.parametrize("schedule", ["fifo", "late"])
def test_race_free_program_gives_the_same_bytes_in_every_legal_order(tmp_path: Path, schedule: str) -> None:
    environment = {"CUDATOOL_DEVICE": f"sim:count=2,schedule={schedule}", "RACES": str(RACES)}
    done = run_python(_RUNNER, *PROGRAMS, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert set(results) == set(PROGRAMS)
    assert {name: result for name, result in results.items() if len(result) != 1 or result[0][1]} == {}
    assert {name for name, [[orders, _]] in results.items() if orders < 2} == set()  # there was something to permute
