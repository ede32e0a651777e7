"""Witnesses of races that the software device recorded: what is found, and what is honestly not."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from typing import Any

import pytest

# Each case is the body of a function; all run in one process, each with a recording of its own.
CASES = {
    "raw": """
        x, y = new(), new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): add[G](x, y)
        ct.synchronize()
        y.get()
    """,
    "war": """
        x, y = new(), new()
        ct.synchronize()
        with ct.stream(a): add[G](x, y)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        y.get()
    """,
    "waw": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        x.get()
    """,
    "waw that nobody looks at": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 3.0)
    """,
    "reuse": """
        y = new()
        ct.synchronize()
        with ct.stream(a):
            x = new()
            put[G](x, 2.0)
        b.wait_stream(a)
        with ct.stream(b): add[G](x, y)
        del x
        with ct.stream(a):
            x = new()
            put[G](x, 5.0)
        ct.synchronize()
        y.get()
    """,
    "same value": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 2.0)
        ct.synchronize()
        x.get()
    """,
    "overwritten before anybody looks": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        put[G](x, 4.0)
        ct.synchronize()
        x.get()
    """,
    "not a number": """
        x = new()
        ct.synchronize()
        with ct.stream(a): put[G](x, float("nan"))
        with ct.stream(b): put[G](x, float("nan"))
        ct.synchronize()
        x.get()
    """,
    "downstream": """
        x, y, z = new(), new(), new()
        ct.synchronize()
        with ct.stream(a): put[G](x, 2.0)
        with ct.stream(b): add[G](x, y)
        ct.synchronize()
        total[G](y, z)
        put[G](x, 0.0)
        put[G](y, 0.0)
        z.get()
    """,
    "copy from the host": """
        x = new()
        ct.synchronize()
        with ct.stream(a): x.copy_(ct.pin_memory(np.full(N, 7, np.float32)), non_blocking=True)
        with ct.stream(b): put[G](x, 3.0)
        ct.synchronize()
        x.get()
    """,
    "two clocks": """
        x, y = new(), new()
        ct.synchronize()
        with ct.stream(a): tick[1, 1](x)
        with ct.stream(b): add[G](x, y)
        ct.synchronize()
        y.get()
    """,
}
_RUNNER = """
import json, sys, tempfile, textwrap
import numpy as np
import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check, with_witnesses
from cudatool.sanitize.report import render_json
from cudatool.sim.tape import Tape
from cudatool.trace.reader import read

SOURCE = '''
extern "C" __global__ void put(float *x, float value) { x[threadIdx.x] = value; }
extern "C" __global__ void add(const float *x, float *y) { y[threadIdx.x] += x[threadIdx.x]; }
extern "C" __global__ void total(const float *x, float *y) { atomicAdd(y, x[threadIdx.x]); }
extern "C" __global__ void tick(float *x) { *(long long *)x = clock64(); }
'''
N, G = 64, (1, 64)
put, add, total, tick = (ct.compile(SOURCE, name) for name in ("put", "add", "total", "tick"))
a, b = ct.Stream(), ct.Stream()
new = lambda: ct.zeros(N, np.float32)
results = {}
for name, body in json.load(sys.stdin).items():
    folder = tempfile.mkdtemp()
    tape = Tape()
    with record(folder + "/t.ctrace", device="sim", measure_accesses=True, tape=tape):
        scope = {}
        exec("def case():\\n" + textwrap.indent(textwrap.dedent(body), "    "), globals(), scope)
        scope["case"]()
    trace = read(folder + "/t.ctrace")
    results[name] = json.loads(render_json(with_witnesses(check(trace), trace, tape, budget_s=60)))
json.dump(results, sys.stdout)
"""


def run_cases(cases: dict[str, str], device: str = "sim") -> dict[str, Any]:
    """Return the report on each case, as JSON has it."""
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps(cases),
        env={**os.environ, "CUDATOOL_DEVICE": device},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return run_cases(CASES)


def only_finding(report: dict[str, Any]) -> dict[str, Any]:
    (finding,) = report["findings"]
    return dict(finding)


def floats(finding: dict[str, Any]) -> list[tuple[float, ...]]:
    witness = finding["witness"]
    held = (bytes.fromhex(witness[name]) for name in ("bytes_a", "bytes_b"))
    return [struct.unpack(f"<{len(data) // 4}f", data) for data in held]


def pair(finding: dict[str, Any], order: str) -> list[int]:
    return [s["record"] for s in finding["witness"][order] if s["record"] in finding["witness"]["exchanged"]]


@pytest.mark.parametrize(
    ("case", "kind", "first", "second"),
    [
        ("raw", "race-raw", 2.0, 0.0),
        ("war", "race-war", 0.0, 3.0),
        ("waw", "race-waw", 3.0, 2.0),
        ("reuse", "reuse", 2.0, 0.0),
        ("copy from the host", "race-waw", 3.0, 7.0),
    ],
)
def test_race_is_proven_by_two_orders_that_copy_other_bytes_to_the_host(reports, case, kind, first, second):
    finding = only_finding(reports[case])
    assert finding["kind"] == kind
    assert floats(finding) == [(first,) * 4, (second,) * 4]
    assert finding["witness"]["observed_at"].startswith("what cuMemcpyDtoHAsync (")
    assert finding["witness"]["observed_at"].endswith("copies to the host")
    assert finding["no_witness"] == ""


def test_the_two_sides_change_places_between_the_orders(reports):
    finding = only_finding(reports["raw"])
    sides = [finding["first"]["record"], finding["second"]["record"]]
    assert pair(finding, "order_a") == sides
    assert pair(finding, "order_b") == sides[::-1]


def test_what_nobody_copies_is_seen_in_memory_at_the_end(reports):
    finding = only_finding(reports["waw that nobody looks at"])
    place = "what the memory allocated at <string>:20 holds in the end, which nothing copied to the host"
    assert finding["witness"]["observed_at"] == place
    assert finding["witness"]["address"] == finding["start"]
    assert floats(finding) == [(3.0,) * 4, (2.0,) * 4]


def test_a_difference_may_show_only_in_what_later_work_makes_of_it(reports):
    finding = only_finding(reports["downstream"])
    assert [values[0] for values in floats(finding)] == [128.0, 0.0]
    assert finding["witness"]["address"] != finding["start"]


@pytest.mark.parametrize("case", ["same value", "overwritten before anybody looks", "not a number"])
def test_race_without_effect_has_no_witness_and_says_so(reports, case):
    finding = only_finding(reports[case])
    assert finding["witness"] is None
    assert finding["no_witness"] == "2 replays, with the two either way round, gave the same bytes"


def test_results_that_differ_by_themselves_prove_nothing(reports):
    finding = only_finding(reports["two clocks"])
    assert finding["witness"] is None
    assert "cannot be trusted" in finding["no_witness"]
