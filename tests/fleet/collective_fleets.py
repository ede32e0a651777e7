"""Fleets whose ranks meet in collectives, by a model of it: each computes, comes, and waits for the last one.

The rule that is tested sees durations only, on clocks that differ; the model knows who came last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cudatool.fleet.convert import Input, convert
from cudatool.trace.events import RECORD, SHARED_COMMUNICATOR, Kind, pack_dims
from cudatool.trace.model import Trace

__all__ = ["Mesh", "meshed", "met", "run_of", "write_fleet", "write_mesh"]

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


@dataclass(frozen=True)
class Mesh:
    """Ranks in a mesh: the collectives of a step are of one axis each, in which a rank meets those that differ in it only.

    Attributes
    ----------
    shape, axes
        Ranks along each axis, the last one's next to each other; and the axis of each collective of a step.
    begins, ends
        When each rank's kernels begin and end: [rank, collective].
    groups
        Number of the communicator, from 1 on: [rank, collective].
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    begins: Times
    ends: Times
    groups: Times

    @property
    def sizes(self) -> list[int]:
        """Ranks of the communicator of each collective."""
        return [self.shape[self.axes[k % len(self.axes)]] for k in range(self.begins.shape[1])]

    def waited(self) -> dict[int, dict[int, int]]:
        """Return by communicator and rank how long the rank waited for the last one of its communicator."""
        result: dict[int, dict[int, int]] = {}
        for k in range(self.begins.shape[1]):
            for group in np.unique(self.groups[:, k]).tolist():
                of = np.flatnonzero(self.groups[:, k] == group)
                own = result.setdefault(group, dict.fromkeys(of.tolist(), 0))
                for rank in of.tolist():
                    own[rank] += int(self.begins[of, k].max() - self.begins[rank, k])
        return result


def meshed(shape: tuple[int, ...], axes: tuple[int, ...], compute: Times, transfer: int) -> Mesh:
    """Run a mesh's ranks through the collectives of `compute`, which is [rank, collective]."""
    places = np.array(np.unravel_index(np.arange(len(compute)), shape))
    begins, ends, groups = np.zeros_like(compute), np.zeros_like(compute), np.zeros_like(compute)
    now = np.zeros(len(compute), np.int64)
    for k in range(compute.shape[1]):
        axis = axes[k % len(axes)]
        rest = [places[other] for other in range(len(shape)) if other != axis]
        others = np.ravel_multi_index(rest, [n for other, n in enumerate(shape) if other != axis])
        groups[:, k] = 1 + axis * len(compute) + others
        begins[:, k] = now + compute[:, k]
        for group in np.unique(others):
            now[others == group] = begins[others == group, k].max() + transfer
        ends[:, k] = now
    return Mesh(shape, axes, begins, ends, groups)


def write_mesh(folder: Path, mesh: Mesh, *, seed: int = 0, knows: bool = True, only: int | None = None) -> Path:
    """Write the ranks of a mesh as :func:`write_fleet` does.

    Parameters
    ----------
    knows
        The collectives are calls of :mod:`cudatool.nccl`, which name the communicator; else NCCL's kernels.
    only
        How many ranks have a trace; by default all.
    """
    of = {"communicators": (SHARED_COMMUNICATOR + mesh.groups).tolist(), "sizes": mesh.sizes} if knows else {}
    names = ["all_reduce" if knows else KERNEL] * len(mesh.begins)
    return write_fleet(folder, mesh.begins[:only], mesh.ends[:only], names=names, seed=seed, **of)


def write_fleet(
    folder: Path,
    begins: Times,
    ends: Times,
    *,
    names: list[str] | None = None,
    seed: int = 0,
    size: int = 0,
    sizes: list[int] | None = None,
    communicators: list[list[int]] | None = None,
    device_kind: str = "cuda",
) -> Path:
    """Write the ranks, each with a clock of its own, convert them, and return the data set.

    Parameters
    ----------
    names
        The kernels of each rank; of all by default the same all-reduce.
    size
        Ranks of the communicator, if the collectives are calls of :mod:`cudatool.nccl` in place of kernels.
    sizes, communicators
        The same for each collective; and each rank's communicators, which else are those that a process counts.
    """
    chance = np.random.default_rng(seed)
    (folder / "ranks").mkdir(parents=True)
    inputs = []
    for rank in range(len(begins)):
        offset = int(chance.integers(0, 10**12))  # clocks of devices count from anywhere
        path = folder / "ranks" / f"rank{rank}.json"
        said = {"starts": (begins[rank] + offset).tolist(), "ends": (ends[rank] + offset).tolist(), "rank": rank}
        said["device_kind"] = device_kind
        said["sizes"] = sizes or [size] * begins.shape[1]
        said["communicators"] = communicators[rank] if communicators else [1] * begins.shape[1]
        path.write_text(json.dumps({**said, "name": names[rank] if names else KERNEL}))
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
    calls = any(said["sizes"])
    launches["kind"] = Kind.COLLECTIVE if calls else Kind.KERNEL_LAUNCH
    launches["aux0"] = said["communicators"] if calls else 0
    launches["aux1"] = [pack_dims(said["rank"], size) if calls else 0 for size in said["sizes"]]
    ran["kind"] = Kind.EXECUTION
    ran["aux0"], ran["aux1"] = said["starts"], said["ends"]
    for rows in (launches, ran):
        rows["name"], rows["correlation"] = 1, 1 + np.arange(count)
    records["time"] = np.arange(len(records)) * 1000
    header = {"device_kind": said["device_kind"], "world_size": "0"}
    return Trace(records, ["", said["name"]], [()], [], ["main"], header, [], str(path))
