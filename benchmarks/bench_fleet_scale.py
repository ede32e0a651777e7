"""What `cudatool export --to parquet`, `fleet` and `query` cost by the number of ranks; pandas on the same files.

    python benchmarks/bench_fleet_scale.py --ranks 64 256 1024 --events 100000
    python benchmarks/bench_fleet_scale.py --pandas /tmp/with-pandas/bin/python   # has pandas and pyarrow

Traces of a training loop (large_recordings.py), whose steps are ranges: each rank has its own addresses and times, and
one requests larger blocks from its middle on, which `fleet` must name. Wall and processor time of the command and of
the processes that it starts, and the most memory that they hold together, looked up every 50 ms. Each line's last
figures are for each rank: they stay the same where cost grows linearly.

Measured on 2 cores that other programs kept busy, 100,000 events a rank; processor time of all processes::

    ranks                             64           256            1024
    convert                22.5 s, 382 MiB  88.6 s, 395 MiB  391.7 s, 404 MiB
    fleet                   1.6 s, 144 MiB   2.2 s, 188 MiB    8.3 s, 277 MiB
    first difference        1.1 s, 106 MiB   1.1 s, 108 MiB    2.8 s, 113 MiB
        with pandas         1.1 s, 321 MiB   2.9 s, 814 MiB   10.9 s, 2274 MiB
    bytes by call site      0.9 s,  95 MiB   1.0 s, 129 MiB    2.3 s, 244 MiB
        with pandas         1.6 s, 529 MiB  3.7 s, 1530 MiB   21.5 s, 5648 MiB

Since then `fleet` reads the allocations of ranks that differ alone, and sorts fewer call sites. With 1,024 ranks, on
the same cores and nothing beside it, wall and processor time: convert 154 s, 302 s, 403 MiB; fleet 2.0 s, 2.7 s,
145 MiB; first difference 1.2 s, 2.0 s, 113 MiB; bytes by call site 1.1 s, 1.8 s, 232 MiB.

The peer answers two questions that `cudatool query` answers beside it, and must give the same rows: at which allocation
each rank first leaves the sequence of rank 0; and the bytes that call sites requested, by rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from large_recordings import STEPS, pattern, whole, write_records

from cudatool.trace.events import RECORD, Kind

_LOOK_S = 0.05
_STARTED = 1_790_000_000_000_000_000
_COMMAND = [sys.executable, "-m", "cudatool"]

_QUESTIONS = {
    "first difference": (
        "SELECT a.rank, min(a.sequence) AS first FROM allocations a JOIN (SELECT sequence, full_hash FROM allocations "
        "WHERE rank = 0) usual USING (sequence) WHERE a.full_hash <> usual.full_hash GROUP BY a.rank ORDER BY a.rank",
        """
own = pandas.concat(read(path, ["sequence", "full_hash"]) for path in parts("allocations"))
usual = own[own["rank"] == 0][["sequence", "full_hash"]]
both = own.merge(usual, on="sequence", suffixes=("", "_usual"))
first = both[both["full_hash"] != both["full_hash_usual"]].groupby("rank")["sequence"].min()
rows = [[int(rank), int(first)] for rank, first in first.items()]
""",
    ),
    "bytes by call site": (
        "SELECT rank, site, sum(requested)::BIGINT AS bytes FROM allocations GROUP BY rank, site "
        "ORDER BY bytes DESC, rank, site LIMIT 20",
        """
own = pandas.concat(read(path, ["site", "requested"]) for path in parts("allocations"))
bytes = own.groupby(["rank", "site"])["requested"].sum().reset_index()
bytes = bytes.sort_values(["requested", "rank", "site"], ascending=[False, True, True]).head(20)
rows = [[int(rank), site, int(size)] for rank, site, size in bytes.itertuples(index=False)]
""",
    ),
}
_PEER = """
import glob, json, re, sys
import pandas
def parts(table):
    return sorted(glob.glob(f"{sys.argv[1]}/run=*/rank=*/trace=*/{table}.parquet"))
def read(path, columns):
    return pandas.read_parquet(path, columns=columns).assign(rank=int(re.search("/rank=([0-9]+)/", path)[1]))
"""


@dataclass(frozen=True)
class Cost:
    """Of a command with the processes that it started."""

    wall_s: float
    processor_s: float
    peak_mib: float
    status: int
    output: str

    def row(self, ranks: int) -> str:
        each = f"{self.processor_s / ranks * 1e3:6.1f} ms a rank"
        return f"wall {self.wall_s:7.1f} s, processor {self.processor_s:7.1f} s, {self.peak_mib:6.0f} MiB; {each}"


def _resident_mib(group: int) -> float:
    """Return the memory of the processes of a group, in MiB; pages that they share count once for each."""
    pages = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) == group:
                pages += int((path / "statm").read_text().split()[1])
        except OSError:
            continue  # it has ended since
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def cost(command: Sequence[str | Path]) -> Cost:
    """Run a command and return what it cost."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True)
        peak = 0.0
        while True:
            peak = max(peak, _resident_mib(process.pid))
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(_LOOK_S)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - start
        output.seek(0)
        text = output.read().decode()
    return Cost(wall, used.ru_utime + used.ru_stime, peak, process.returncode, text)


def make_traces(folder: Path, ranks: int, events: int, differs: int) -> None:
    """Write a trace for each rank, of which one differs from the others."""
    base = _with_steps(whole(*pattern(), events))
    chance = np.random.default_rng(1)
    folder.mkdir()
    for rank in range(ranks):
        records = base.copy()
        memory = records["kind"] <= Kind.SEGMENT_UNMAP
        records["address"][memory] += np.uint64(int(chance.integers(1, 1000)) << 21)
        gaps = np.diff(base["time"], prepend=base["time"][:1]) * chance.uniform(0.98, 1.02, len(base))
        records["time"] = _STARTED + np.cumsum(gaps).astype(np.int64)
        if rank == differs:
            late = np.flatnonzero(records["kind"] == Kind.BLOCK_ALLOC)
            late = late[len(late) // 2 :]
            chosen = late[records["size"][late] >= 1 << 20]
            for name in ("size", "aux0"):
                records[name][chosen] += np.uint64(512)
        facts = {"rank": str(rank), "world_size": str(ranks), "host": f"node{rank // 8}", "job": "bench"}
        write_records(folder / f"rank{rank}.ctrace", records, ("step",), **facts)


def _with_steps(records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return the records with ranges: the steps of the loop have the same number of events."""
    count = 64
    at = np.linspace(len(records) // (4 * STEPS), len(records), count + 1).astype(int)
    marks = np.zeros(2 * count, RECORD)
    marks["kind"] = np.tile([int(Kind.RANGE_PUSH), int(Kind.RANGE_POP)], count)
    marks["name"] = 1
    places = np.stack([at[:-1], at[1:]], axis=1).ravel()
    marks["time"] = records["time"][np.minimum(places, len(records) - 1)]
    return np.insert(records, places, marks)


def measure(ranks: int, folder: Path, differs: int, jobs: int, pandas: str | None) -> None:
    """Convert the traces of a folder, ask, and print the costs."""
    dataset = folder.parent / "set"
    sources = [folder / f"rank{rank}.ctrace" for rank in range(ranks)]
    made = cost([*_COMMAND, "export", *sources, "--to", "parquet", "-o", dataset, "--jobs", str(jobs)])
    assert made.status == 0, made
    parquet = sum(path.stat().st_size for path in dataset.rglob("*.parquet")) / (1 << 20)
    print(f"{ranks:5} ranks convert            {made.row(ranks)}; {parquet:.0f} MiB of Parquet", flush=True)
    asked = cost([*_COMMAND, "fleet", dataset, "--json"])
    assert asked.status in (0, 1), asked
    found = {finding["rank"] for finding in json.loads(asked.output)["runs"][0]["findings"]}
    print(f"{ranks:5} ranks fleet              {asked.row(ranks)}; named {sorted(found)}", flush=True)
    assert found == {differs}, (found, differs)
    for name, (question, peer) in _QUESTIONS.items():
        own = cost([*_COMMAND, "query", dataset, question, "--json"])
        print(f"{ranks:5} ranks {name:18} {own.row(ranks)}", flush=True)
        if pandas:
            other = cost([pandas, "-c", f"{_PEER}{peer}\nprint(json.dumps(rows))", str(dataset)])
            ratio = f"{other.processor_s / own.processor_s:.1f} times the processor time"
            print(f"{'':6}      with pandas        {other.row(ranks)}", flush=True)
            print(f"{'':6}      pandas: {ratio}, {other.peak_mib / own.peak_mib:.1f} times the memory", flush=True)
            assert other.status == 0 and json.loads(own.output)["rows"] == json.loads(other.output)
    subprocess.run(["rm", "-r", dataset], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pandas", metavar="PYTHON", help="an interpreter that has pandas and pyarrow")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as folder:
        traces = Path(folder) / "traces"
        differs = min(options.ranks) // 2
        make_traces(traces, max(options.ranks), options.events, differs)
        for ranks in sorted(options.ranks):
            measure(ranks, traces, differs, options.jobs, options.pandas)


if __name__ == "__main__":
    main()
