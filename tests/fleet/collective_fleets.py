"""Fleets whose ranks meet in collectives, by a model of it: each computes, comes, and waits for the last one.

The rule that is tested sees durations only, on clocks that differ; the model knows who came last.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cudatool.fleet.convert import Input, convert
from cudatool.trace.events import RECORD, Kind, pack_dims
from cudatool.trace.model import Trace

__all__ = ["met", "run_of", "write_fleet"]

Times = npt.NDArray[np.int64]
KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def met(compute: Times, transfer: Times) -> tuple[Times, Times]:
    """Return when each rank's kernels begin and end: `compute` is [rank, collective], `transfer` [collective]."""
    begins, ends = np.zeros_like(compute), np.zeros_like(compute)
    now = np.zeros(len(compute), np.int64)
    for k in range(compute.shape[1]):
        begins[:, k] = now + compute[:, k]
        ends[:, k] = now = np.full(len(compute), begins[:, k].max() + transfer[k])
    return begins, ends


def write_fleet(
    folder: Path, begins: Times, ends: Times, *, names: list[str] | None = None, seed: int = 0, size: int = 0
) -> Path:
    """Write the ranks, each with a clock of its own, convert them, and return the data set.

    Parameters
    ----------
    names
        The kernels of each rank; of all by default the same all-reduce.
    size
        Ranks of the communicator, if the collectives are calls of :mod:`cudatool.nccl` in place of kernels.
    """
    chance = np.random.default_rng(seed)
    (folder / "ranks").mkdir(parents=True)
    inputs = []
    for rank in range(len(begins)):
        offset = int(chance.integers(0, 10**12))  # clocks of devices count from anywhere
        path = folder / "ranks" / f"rank{rank}.json"
        said = {"starts": (begins[rank] + offset).tolist(), "ends": (ends[rank] + offset).tolist()}
        path.write_text(json.dumps({**said, "name": names[rank] if names else KERNEL, "size": size, "rank": rank}))
        inputs.append(Input(path, ""))
    failed = [outcome for outcome in convert(inputs, folder / "set", run_of, jobs=1) if outcome.error]
    assert not failed, failed[0]
    return folder / "set"


def run_of(path: Path) -> Trace:
    """Return the trace of one rank: a block of memory, and the kernels with their times."""
    said = json.loads(path.read_text())
    count = len(said["starts"])
    records = np.zeros(1 + 2 * count, RECORD)
    records[0]["kind"], records[0]["size"], records[0]["aux0"], records[0]["address"] = Kind.BLOCK_ALLOC, 512, 512, 512
    launches, ran = records[1 : 1 + count], records[1 + count :]
    launches["kind"] = Kind.COLLECTIVE if said["size"] else Kind.KERNEL_LAUNCH
    launches["aux1"] = pack_dims(said["rank"], said["size"]) if said["size"] else 0
    ran["kind"] = Kind.EXECUTION
    ran["aux0"], ran["aux1"] = said["starts"], said["ends"]
    for rows in (launches, ran):
        rows["name"], rows["correlation"] = 1, 1 + np.arange(count)
    records["time"] = np.arange(len(records)) * 1000
    header = {"device_kind": "cuda", "world_size": "0"}
    return Trace(records, ["", said["name"]], [()], [], ["main"], header, [], str(path))
