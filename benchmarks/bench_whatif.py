"""Compares predictions with measurements: one recording's requests under settings that were also recorded.

    python benchmarks/bench_whatif.py FOLDER [--cut SHARE ...]

FOLDER holds WORKLOAD__SETTINGS.pickle.xz and .stats.json files, as record_torch_workloads.py writes them. For every
workload and each of its recordings, the peak of reserved bytes under the settings of the others is predicted. With
``--cut``, predictions are also made from recordings that lost this share of their events at the beginning.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudatool import analyze
from cudatool.collect import plain_pickle, torch_snapshot
from cudatool.trace.events import Kind

MIB = 1024 * 1024
_LOST_WITH_THEM = ("alloc", "oom")  # actions that are requests


class Row(NamedTuple):
    """A prediction and its measured value."""

    workload: str
    base: str
    settings: str
    cut: float
    predicted: int
    measured: int
    caveats: tuple[str, ...]
    runs_out: tuple[bool, bool]  # predicted, measured

    @property
    def error(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def facts_of(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(str(path).replace(".pickle.xz", ".stats.json")).read_text())
    fraction = facts["memory_fraction"]
    limit = f"per_process_memory_fraction:{fraction}" if fraction else ""
    facts["whole_conf"] = ",".join(part for part in (facts["conf"], limit) if part)
    return facts


def cut_recording(path: Path, share: float, folder: Path) -> tuple[torch_snapshot.MemorySnapshot, int]:
    """Return a recording without the first part of its events, and how many requests are in that part."""
    if not share:
        return torch_snapshot.read(path), 0
    data = plain_pickle.load(path)
    events = data["device_traces"][0]
    lost = events[: int(share * len(events))]
    data["device_traces"][0] = events[len(lost) :]
    (folder / "cut.pickle").write_bytes(pickle.dumps(data))
    return torch_snapshot.read(folder / "cut.pickle"), sum(event["action"] in _LOST_WITH_THEM for event in lost)


def measured_peak(path: Path, skipped: int) -> int | None:
    """Return the most bytes that were reserved at a time from a request on; None if it ended before."""
    if not skipped:
        return int(facts_of(path)["stats"]["reserved_bytes.all.peak"])
    records = torch_snapshot.read(path).records
    kind, size = records["kind"], records["size"].astype(np.int64)
    gains, losses = (
        np.isin(kind, kinds)
        for kinds in ([Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP], [Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP])
    )
    level = np.cumsum(np.where(gains, size, 0) - np.where(losses, size, 0))
    requests = np.flatnonzero(np.isin(kind, [Kind.BLOCK_ALLOC, Kind.OOM]))
    return int(level[requests[skipped] :].max()) if skipped < len(requests) else None


def rows(folder: Path, cuts: list[float]) -> Iterator[Row]:
    workloads: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*.pickle.xz")):
        workloads[path.name.rsplit("_", 1)[0].rstrip("_")].append(path)
    with tempfile.TemporaryDirectory() as scratch:
        for workload, paths in workloads.items():
            for base, other in permutations(paths, 2):
                own, found = facts_of(base), facts_of(other)
                for cut in cuts:
                    trace, skipped = cut_recording(base, cut, Path(scratch))
                    measured = measured_peak(other, skipped)
                    if measured is None:
                        continue
                    settings, _ = analyze.recorded_settings(trace)
                    if own["memory_fraction"]:
                        fraction = float(own["memory_fraction"])
                        settings = replace(settings, per_process_memory_fraction=fraction)
                    settings = replace(settings, text=own["whole_conf"])
                    (outcome,) = analyze.what_if(
                        trace,
                        0,
                        [found["whole_conf"]],
                        recorded=settings,
                        recorded_memory=own["device_total_bytes"],
                    )
                    names = [path.name.rsplit("_", 1)[1].split(".pickle")[0] for path in (base, other)]
                    yield Row(
                        workload,
                        *names,
                        cut,
                        outcome.reserved_peak_bytes,
                        measured,
                        outcome.caveats,
                        (outcome.oom is not None, bool(found["stats"]["num_ooms"])),
                    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cut", type=float, nargs="*", default=[])
    options = parser.parse_args()
    print(f"{'workload':12}{'from':12}{'to':12}{'cut':>5}{'predicted':>12}{'measured':>10}{'error':>9}  caveats")
    found = []
    for row in rows(options.folder, [0.0, *options.cut]):
        found.append(row)
        peaks = f"{row.predicted / MIB:12.0f}{row.measured / MIB:10.0f}{row.error:8.2f}%"
        print(f"{row.workload:12}{row.base:12}{row.settings:12}{row.cut:5}{peaks}  {' '.join(row.caveats)}")
    for name, some in (
        ("whole", [row for row in found if not row.cut]),
        ("cut", [row for row in found if row.cut]),
        ("without caveat", [row for row in found if not row.caveats]),
    ):
        errors = [abs(row.error) for row in some]
        if errors:
            print(
                f"{name}: {len(errors)} pairs, {sum(error <= 1 for error in errors)} within 1 %, median "
                f"{statistics.median(errors):.3f} %, largest {max(errors):.2f} %; running out of memory foreseen "
                f"rightly in {sum(a == b for a, b in (row.runs_out for row in some))}"
            )


if __name__ == "__main__":
    main()
