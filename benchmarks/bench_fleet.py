"""How many faults `cudatool fleet` names, in fleets made of real recordings, and what conversion and question cost.

    python benchmarks/bench_fleet.py                 # 40 faults, 20 healthy fleets
    python benchmarks/bench_fleet.py --pairs         # 36 faults on one of two ranks, 20 healthy pairs
    python benchmarks/bench_fleet.py --cost 16 64    # processor time and memory by ranks

Figures are processor time: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / folder) for folder in (".", "fleet")]

from fleets import EXPECTED, FAULTS, Fault, make, recordings_with_steps  # noqa: E402

from cudatool.fleet.query import opened  # noqa: E402
from cudatool.fleet.report import RunReport, fleet_report  # noqa: E402

_RANKS = (8, 12, 8, 16, 8, 8, 32, 8)


def reported(dataset: Path) -> RunReport:
    with opened(dataset) as database:
        [run] = fleet_report(database)
    return run


def faults(count: int, healthy: int) -> None:
    recordings = recordings_with_steps()
    named = accused = 0
    for number in range(count):
        kind, ranks = FAULTS[number % len(FAULTS)], 64 if number == count - 1 else _RANKS[number % len(_RANKS)]
        fault = Fault(kind, (number * 7) % ranks)
        recording = recordings[number // len(FAULTS) % len(recordings)]
        with tempfile.TemporaryDirectory() as folder:
            run = reported(make(Path(folder), recording, ranks, [fault], seed=number))
        found = [(f.rank, str(f.difference)) for f in run.findings]
        right = found[:1] == [(fault.rank, str(EXPECTED[kind]))] and {rank for rank, _ in found} == {fault.rank}
        named += right
        print(
            f"{number + 1:3} {kind:11} rank {fault.rank:2} of {ranks:2} {recording.name[:24]:24} {right} {found[:4]}",
            flush=True,
        )
    for number in range(healthy):
        recording = recordings[number % len(recordings)]
        with tempfile.TemporaryDirectory() as folder:
            run = reported(make(Path(folder), recording, _RANKS[number % len(_RANKS)], [], seed=1000 + number))
        accused += bool(run.findings) or not run.compared
        print(
            f"healthy {number + 1} {recording.name} {[(f.rank, str(f.difference)) for f in run.findings]}", flush=True
        )
    print(f"named rightly: {named} of {count}; healthy fleets with findings: {accused} of {healthy}")


def pairs(count: int, healthy: int) -> None:
    """Print what is said of two ranks: faults as differences that name both, nothing of healthy ones."""
    recordings = recordings_with_steps()
    found = accused = reported_healthy = 0
    for number in range(count):
        kind, rank = FAULTS[number % len(FAULTS)], number // len(FAULTS) % 2
        recording = recordings[number // len(FAULTS) % len(recordings)]
        with tempfile.TemporaryDirectory() as folder:
            run = reported(make(Path(folder), recording, 2, [Fault(kind, rank)], seed=number))
        assert run.pair is not None
        differences = [str(one.difference) for one in run.pair.differences]
        found += differences[:1] == [str(EXPECTED[kind])]
        accused += any(one.difference is not EXPECTED["oom"] for one in run.findings)
        print(f"{number + 1:3} {kind:11} on rank {rank} {recording.name[:24]:24} {differences}", flush=True)
    for number in range(healthy):
        recording = recordings[number % len(recordings)]
        with tempfile.TemporaryDirectory() as folder:
            run = reported(make(Path(folder), recording, 2, [], seed=1000 + number))
        reported_healthy += run.has_differences or not run.compared
    print(
        f"found: {found} of {count}; a rank accused: {accused}; healthy pairs reported: {reported_healthy} of {healthy}"
    )


def cost(sizes: list[int]) -> None:
    recording = max(recordings_with_steps(), key=lambda path: path.stat().st_size)
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            dataset = make(Path(folder), recording, ranks, [Fault("size", ranks // 2)], seed=ranks)
            converted, start = time.process_time() - start, time.process_time()
            run = reported(dataset)
            asked = time.process_time() - start
            with opened(dataset) as database:
                [(events,)] = database.execute("SELECT count(*) FROM events").fetchall()
            size = sum(path.stat().st_size for path in dataset.rglob("*.parquet"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        rate = f"{converted / events * 1e6:.2f} us an event, {size / events:.1f} B an event on disk"
        print(f"{ranks:5} ranks {events:,} events: convert {converted:.1f} s ({rate}), fleet {asked:.2f} s; {peak} MiB")
        assert {finding.rank for finding in run.findings} == {ranks // 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--cost", type=int, nargs="+", metavar="RANKS")
    options = parser.parse_args()
    if options.cost:
        cost(options.cost)
    elif options.pairs:
        pairs(36, options.healthy)
    else:
        faults(options.faults, options.healthy)


if __name__ == "__main__":
    main()
