"""The cost of `pytest --cudatool` for a suite of CUDA tests: its time without it and under each check, and the ratio.

The suite is given, or made here: many short tests with arrays, copies, fills, two streams with events, and a kernel.
All runs are on one device and take turns; the shortest of the rounds counts. Seconds are those of set-up, call,
tear-down as pytest measures them, so that starting the interpreter and the device does not blur the ratio. Processor
seconds are those of the process, less those of a run that only collects: on a busy machine they say more.

    python benchmarks/bench_plugin.py [--device sim] [--rounds 3] [SUITE ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

SUITE = '''
import cudatool as ct
import numpy as np
import pytest

SOURCE = """extern "C" __global__ void axpy(float *y, const float *x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}"""
kernel = ct.compile(SOURCE, "axpy")

@pytest.fixture(scope="module")
def weights():
    return ct.asarray(np.arange(1 << 12, dtype=np.float32))

@pytest.mark.parametrize("size", range(64, 64 * 101, 64))
def test_launches(size):
    x, y = ct.ones(size), ct.zeros(size)
    for _ in range(10):
        kernel[(size + 255) // 256, 256](y, x, 2.0, size)
    assert (y.get() == 20).all()

@pytest.mark.parametrize("number", range(100))
def test_streams(number, weights):
    side, done = ct.Stream(), ct.Event()
    out = ct.zeros(weights.shape)
    side.wait_stream(ct.current_stream())
    with side:
        for _ in range(5):
            kernel[16, 256](out, weights, 1.0, weights.size)
        done.record(side)
    ct.current_stream().wait_event(done)
    assert out[number].get() == 5 * number

@pytest.mark.parametrize("number", range(100))
def test_without_a_device(number):
    assert sorted(range(number), reverse=True)[::-1] == list(range(number))
'''
RUNS = {
    "without the plugin": ["-p", "no:cudatool"],
    "not asked for": [],
    "--cudatool-checks=race": ["--cudatool", "--cudatool-checks=race"],
    "--cudatool": ["--cudatool"],
    "--cudatool-checks=all": ["--cudatool", "--cudatool-checks=race,memcheck,initcheck,racecheck,synccheck"],
}


def run(suite: list[str], device: str, arguments: list[str], folder: str) -> tuple[float, float, int, int]:
    """Return seconds in tests, seconds of processor time in tests, number of tests and number of failures."""
    junit = Path(folder, "junit.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *suite, *arguments]
    processor = []
    for extra in ("--collect-only", f"--junitxml={junit}"):
        before = os.times()
        environment = {**os.environ, "CUDATOOL_DEVICE": device}
        done = subprocess.run([*command, extra], env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(done.stdout + done.stderr)
        after = os.times()
        processor.append(after.children_user - before.children_user + after.children_system - before.children_system)
    cases = list(ET.parse(junit).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return sum(float(case.get("time", 0)) for case in cases), processor[1] - processor[0], len(cases), len(bad)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=os.environ.get("CUDATOOL_DEVICE", "auto"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("suite", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        suite = given.suite
        if not suite:
            file = Path(folder, "test_suite.py")
            file.write_text(SUITE)
            suite = [f"--rootdir={folder}", str(file)]
        for arguments in RUNS.values():  # fill the caches of compiled code
            run(suite, given.device, arguments, folder)
        rounds = [
            {name: run(suite, given.device, arguments, folder) for name, arguments in RUNS.items()}
            for _ in range(given.rounds)
        ]
    print(f"{'':26}{'tests':>7}{'failed':>7}{'seconds':>9}{'ratio':>7}{'processor s':>13}{'ratio':>7}{'ms a test':>11}")
    best = {name: tuple(min(column) for column in zip(*(one[name] for one in rounds), strict=True)) for name in RUNS}
    base = best["without the plugin"]
    for name, (seconds, processor, tests, failed) in best.items():
        print(
            f"{name:26}{tests:7,}{failed:7,}{seconds:9.2f}{seconds / base[0]:7.2f}"
            f"{processor:13.2f}{processor / base[1]:7.2f}{processor / tests * 1000:11.2f}"
        )


if __name__ == "__main__":
    main()
