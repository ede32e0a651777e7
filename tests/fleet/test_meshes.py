"""Who waits for whom in groups of ranks: ranks of one communicator are compared, and what cannot be told is said."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from collective_fleets import Mesh, meshed, write_fleet, write_mesh
from collective_fleets import met as all_met

from cudatool.cli import group
from cudatool.fleet.pace import Collectives, RankWait, awaited
from cudatool.fleet.query import opened
from cudatool.fleet.report import Difference, RunReport, fleet_report
from cudatool.trace.events import SHARED_COMMUNICATOR

COUNT = 120  # collectives
# Shape, and the axes of a step's collectives: tensor parallel several times, then data parallel.
MESHES = {
    "2x4": ((2, 4), (1, 1, 1, 0)),
    "4x2": ((4, 2), (1, 1, 0)),
    "4x2x2": ((4, 2, 2), (2, 2, 1, 0)),
    "2x4x4": ((2, 4, 4), (2, 1, 2, 0)),
    "3x3": ((3, 3), (1, 0)),
}


def report(dataset: Path) -> RunReport:
    with opened(dataset) as database:
        [run] = fleet_report(database)
    return run


def mesh(name: str, seed: int, slow: dict[int, float] | None = None, noise: float = 0.05) -> Mesh:
    shape, axes = MESHES[name]
    chance = np.random.default_rng(seed)
    work = 2e6 * chance.uniform(1 - noise, 1 + noise, (math.prod(shape), COUNT))
    for rank, factor in (slow or {}).items():
        work[rank] *= factor
    return meshed(shape, axes, work.astype(np.int64), 300_000)


def accused(run: RunReport) -> list[int]:
    return [finding.rank for finding in run.findings if finding.difference is Difference.AWAITED]


@pytest.mark.some_of("name", list(MESHES), 2)
def test_the_slow_rank_of_a_mesh_is_named_and_not_whom_it_held_up(name: str, tmp_path: Path) -> None:
    one = mesh(name, 1, {5: 1.5})
    run = report(write_mesh(tmp_path, one))
    assert [5] == accused(run), run.not_looked_at
    # Each communicator has its own ranks, and what the model knows that they waited.
    found = {met.communicator - SHARED_COMMUNICATOR: met for met in run.groups}
    assert run.collectives is None
    assert one.waited() == {n: {rank.rank: rank.waited for rank in met.ranks} for n, met in found.items()}


@pytest.mark.parametrize("name", ["2x4", "4x2x2"])
def test_healthy_meshes_are_not_accused(name: str, tmp_path: Path) -> None:
    run = report(write_mesh(tmp_path, mesh(name, 2)))
    assert [] == accused(run) and len(run.groups) > 5
    assert not any("Who waits" in sentence for sentence in run.not_looked_at)


@pytest.mark.parametrize("slow", [{}, {5: 1.5}])
@pytest.mark.some_of("name", ["2x4", "4x2", "4x2x2", "3x3"], 1)
def test_kernels_that_are_of_groups_are_not_compared_and_that_is_said(
    name: str, slow: dict[int, float], tmp_path: Path
) -> None:
    run = report(write_mesh(tmp_path, mesh(name, 3, slow), knows=False))
    assert [] == accused(run) and run.collectives is None and () == run.groups
    assert any("does not say which ranks form a group" in sentence for sentence in run.not_looked_at)


def test_kernels_of_all_ranks_may_end_a_little_apart(tmp_path: Path) -> None:
    """The last piece of a ring arrives later at some ranks, and clocks of hosts drift apart."""
    work = 2e6 * np.random.default_rng(4).uniform(0.95, 1.05, (8, COUNT))
    work[3] *= 1.4
    begins, ends = all_met(work.astype(np.int64), np.full(COUNT, 400_000))
    chance = np.random.default_rng(5)
    ends = ends + chance.integers(0, 10_000, ends.shape)
    drift = 1 + 5e-5 * chance.uniform(-1, 1, (8, 1))
    run = report(write_fleet(tmp_path, (begins * drift).astype(np.int64), (ends * drift).astype(np.int64)))
    assert [3] == accused(run) and run.collectives is not None


def test_a_group_some_of_whose_ranks_have_no_trace_is_not_compared(tmp_path: Path) -> None:
    run = report(write_mesh(tmp_path, mesh("2x4", 6, {1: 1.5}), only=6))
    # The tensor-parallel group 0 to 3 is whole, and so are the pairs of 0, 4 and 1, 5.
    ranks = sorted(tuple(rank.rank for rank in met.ranks) for met in run.groups)
    assert [(0, 1, 2, 3), (0, 4), (1, 5)] == ranks and [1] == accused(run)
    assert any("3 of the communicators have ranks without a trace" in sentence for sentence in run.not_looked_at)


def test_of_two_ranks_in_a_group_of_a_mesh_none_is_accused(tmp_path: Path) -> None:
    """The first and the last stage of a pipeline may meet in pairs, and one of them always comes later."""
    work = 2e6 * np.random.default_rng(7).uniform(0.95, 1.05, (8, COUNT))
    work[6:] *= 1.5
    run = report(write_mesh(tmp_path, meshed((2, 4), (0,), work.astype(np.int64), 300_000)))
    assert [] == accused(run) and [2] * 4 == [len(met.ranks) for met in run.groups]
    assert [6, 7] == sorted(late.rank for met in run.groups if (late := met.later()))


def test_numbers_that_each_process_counts_are_no_groups(tmp_path: Path) -> None:
    """Recordings of before: their communicators are numbered by each process, and only those of all ranks are known."""
    begins, ends = all_met(
        (2e6 * np.random.default_rng(8).uniform(0.95, 1.05, (4, COUNT))).astype(np.int64), np.full(COUNT, 9)
    )
    sizes = [4 if k % 2 else 2 for k in range(COUNT)]
    of = {"names": ["all_reduce"] * 4, "sizes": sizes, "communicators": [[1 + k % 2 for k in range(COUNT)]] * 4}
    run = report(write_fleet(tmp_path, begins, ends, **of))
    assert () == run.groups and run.collectives is not None and COUNT // 2 == run.collectives.compared


def test_the_command_shows_groups(tmp_path: Path) -> None:
    done = CliRunner().invoke(group, ["fleet", str(write_mesh(tmp_path, mesh("2x4", 1, {5: 1.5})))])
    assert 1 == done.exit_code and "rank 5: the other ranks wait" in done.stdout
    table = done.stdout.partition("Collectives of groups of ranks")[2].splitlines()
    assert "4-7" == table[2].split()[0] and "5" == table[2].split()[1]


def test_the_rule_in_many_meshes() -> None:
    """Against the model, without a data set: healthy meshes are never accused, and slow ranks are found."""
    chance = np.random.default_rng(9)
    wrong = missed = 0
    for number in range(100):
        name = list(MESHES)[number % len(MESHES)]
        ranks = math.prod(MESHES[name][0])
        wrong += bool(awaited(found_in(mesh(name, number, noise=chance.uniform(0.01, 0.2)))))
        slow = int(chance.integers(ranks))
        late = awaited(found_in(mesh(name, number, {slow: chance.uniform(1.4, 3)}, noise=chance.uniform(0.01, 0.1))))
        missed += [rank.rank for rank in late] != [slow]
    assert (0, 0) == (wrong, missed)


def found_in(one: Mesh) -> tuple[Collectives, ...]:
    """What the data set would say of a mesh, in NumPy."""
    result = []
    took = one.ends - one.begins
    for number in np.unique(one.groups).tolist():
        ranks, of = (np.unique(axis) for axis in np.nonzero(one.groups == number))
        own = took[np.ix_(ranks, of)]
        behind = np.median(own, axis=0) - own
        parts = [part.sum(axis=1) for part in np.array_split(behind, 8, axis=1)]
        steady = np.sort(parts, axis=0)[1] * len(parts)
        waits = [
            RankWait(rank, int((own[i] - own.min(axis=0)).sum()), int(behind[i].sum()), int(steady[i]), 0)
            for i, rank in enumerate(ranks.tolist())
        ]
        span = np.median(one.ends[np.ix_(ranks, of)].max(axis=1) - one.begins[np.ix_(ranks, of)].min(axis=1))
        result.append(Collectives(len(of), int(span), tuple(waits), number))
    return tuple(result)
