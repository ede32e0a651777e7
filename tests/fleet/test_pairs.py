"""Two ranks: what differs is said with both sides named, and neither is accused; healthy pairs do not differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from collective_fleets import KERNEL, met, write_fleet
from fleets import EXPECTED, FAULTS, Fault, make, recordings_with_steps
from recordings import HERE

from cudatool.cli import group
from cudatool.fleet.pair import PairDifference
from cudatool.fleet.picture import picture
from cudatool.fleet.query import opened
from cudatool.fleet.report import Difference, RunReport, fleet_report
from cudatool.fleet.words import described_pair

sys.path.insert(0, str(Path(__file__).parents[1] / "security"))
from hostile_datasets import rewrite

RECORDING = HERE / "prefetch__default.pickle.xz"


def report(dataset: Path) -> RunReport:
    with opened(dataset) as database:
        [run] = fleet_report(database)
    return run


def of(run: RunReport, kind: Difference) -> PairDifference:
    assert run.pair is not None
    [found] = [one for one in run.pair.differences if one.difference is kind]
    return found


@pytest.mark.some_of("rank", [0, 1], 1)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_on_one_of_two_ranks_is_a_difference(kind: str, rank: int, tmp_path: Path) -> None:
    run = report(make(tmp_path, RECORDING, 2, [Fault(kind, rank)], seed=1))
    assert run.compared and run.pair is not None and (0, 1) == run.pair.ranks
    found = run.pair.differences[0]
    assert EXPECTED[kind] is found.difference, run.pair.differences
    assert found.values[0] != found.values[1] or kind in ("library", "order")
    # Both sides are named, and what a rank recorded of itself is all that is said of one.
    for one in run.pair.differences:
        words = described_pair(run.pair, one)
        assert one.difference is Difference.LIBRARY or ("rank 0" in words and "rank 1" in words), words
    assert {Difference.OOM} >= {finding.difference for finding in run.findings}


@pytest.mark.some_of("seed", range(2), 1)
@pytest.mark.parametrize("recording", recordings_with_steps(), ids=lambda path: path.name)
def test_healthy_pairs_do_not_differ(recording: Path, seed: int, tmp_path: Path) -> None:
    run = report(make(tmp_path, recording, 2, [], seed=20 + seed))
    assert run.compared and run.pair is not None and not run.has_differences, run.pair.differences
    assert () == run.pair.memory and ((), ()) == run.pair.libraries


def test_larger_sizes_are_named_with_step_and_call_site_and_memory(tmp_path: Path) -> None:
    run = report(make(tmp_path, RECORDING, 2, [Fault("size", 1)], seed=3))
    found = of(run, Difference.SIZE)
    assert found.sites[0] == found.sites[1] != "" and found.sequence > 0 and found.steps[0] == found.steps[1] > 0
    one, two = found.values
    assert two // 512 == one * 3 // 2 // 512
    words = described_pair(run.pair, found)
    assert f"from allocation {found.sequence:,} on (step {found.steps[0]}), {found.sites[0]}: rank 0 requests" in words


def test_what_is_held_at_the_peaks_differs_by_the_same_bytes_however_it_is_divided(tmp_path: Path) -> None:
    run = report(make(tmp_path, RECORDING, 2, [Fault("leak", 1)], seed=3))
    one, two = (rank.peak_active for rank in run.ranks)
    assert one < two and (one, two) == of(run, Difference.PEAK).values
    for by in ("site", "category", "library"):
        rows = [row.bytes for row in run.pair.memory if row.by == by]
        assert two - one == sum(b - a for a, b in rows), by
    held = {row.name: row.bytes for row in run.pair.memory if row.by == "site"}
    assert 0 == held["train.py:41 (keep_history)"][0] < held["train.py:41 (keep_history)"][1]


def test_call_sites_on_the_page_of_two_ranks_are_beside_the_other_ranks(tmp_path: Path) -> None:
    with opened(make(tmp_path, RECORDING, 2, [Fault("leak", 1)], seed=3)) as database:
        [run] = fleet_report(database)
        sites = picture(database, run).sites
    by_rank = [{row.site: (row.bytes, row.usual) for row in sites if row.rank == rank} for rank in (0, 1)]
    leak = "train.py:41 (keep_history)"
    assert 0 == by_rank[0][leak][0] < by_rank[0][leak][1]  # a site that the rank does not have is in its table, too
    assert {site: (bytes, usual) for site, (usual, bytes) in by_rank[1].items()} == by_rank[0]


def test_a_fault_is_the_same_difference_on_either_rank(tmp_path: Path) -> None:
    runs = [report(make(tmp_path / str(rank), RECORDING, 2, [Fault("size", rank)], seed=3)) for rank in (0, 1)]
    one, two = (of(run, Difference.SIZE) for run in runs)
    assert one.sequence == two.sequence and one.steps == two.steps and one.values == two.values[::-1]


def test_what_only_one_rank_goes_on_to_allocate_is_a_difference(tmp_path: Path) -> None:
    dataset = make(tmp_path, RECORDING, 2, [], seed=5)
    [part] = dataset.glob("run=*/rank=1/trace=*")
    rewrite(part / "allocations.parquet", "FROM old WHERE sequence IS NULL OR sequence < 500")
    rewrite(part / "checkpoints.parquet", "SELECT * REPLACE (500 AS sequence) FROM old LIMIT 1")
    run = report(dataset)
    found = of(run, Difference.CALL_SITE)
    assert 500 == found.sequence and found.values[0] > 0 and found.values[1] is None
    assert described_pair(run.pair, found).endswith("rank 1 allocates nothing more")


COUNT = 64


def compute(factor: float, late: int) -> np.ndarray:
    work = 2e6 * np.random.default_rng(late).uniform(0.95, 1.05, (2, COUNT))
    work[late] *= factor
    return work.astype(np.int64)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("size", [0, 2])
def test_which_of_two_comes_later_is_said(late: int, size: int, tmp_path: Path) -> None:
    times = met(compute(1.4, late), np.full(COUNT, 400_000))
    run = report(write_fleet(tmp_path, *times, size=size, names=["all_reduce" if size else KERNEL] * 2))
    found = of(run, Difference.AWAITED)
    waited = (times[0].max(axis=0) - times[0]).sum(axis=1)
    assert tuple(waited.tolist()) == found.values
    assert described_pair(run.pair, found).endswith(f": rank {late} comes later") and () == run.findings


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_that_keep_pace_do_not_differ(seed: int, tmp_path: Path) -> None:
    run = report(write_fleet(tmp_path, *met(compute(1.0, seed % 2), np.full(COUNT, 400_000)), seed=seed))
    assert not run.has_differences and run.collectives is not None


def test_a_few_long_stalls_of_two_ranks_are_no_difference(tmp_path: Path) -> None:
    work = compute(1.0, 1)
    work[1, [20, 40]] += 30_000_000
    run = report(write_fleet(tmp_path, *met(work, np.full(COUNT, 400_000))))
    assert not run.has_differences and run.collectives is not None and run.collectives.ranks[0].waited > 55e6


@pytest.mark.parametrize(("faults", "status"), [([], 0), ([Fault("order", 1)], 1)])
def test_the_command_names_both_sides(faults: list[Fault], status: int, tmp_path: Path) -> None:
    dataset = make(tmp_path, RECORDING, 2, faults, seed=6)
    done = CliRunner().invoke(group, ["fleet", str(dataset)])
    assert status == done.exit_code, done.output
    said = "Rank 0 and rank 1 differ; which one is wrong is not known" if faults else "The two ranks do not differ"
    assert said in done.stdout
    shown = json.loads(CliRunner().invoke(group, ["fleet", str(dataset), "--json"]).stdout)
    [run] = shown["runs"]
    assert [0, 1] == run["pair"]["ranks"] and len(faults) == len(run["pair"]["differences"])


def test_one_rank_is_not_compared(tmp_path: Path) -> None:
    run = report(make(tmp_path, RECORDING, 1, [], seed=4))
    assert not run.compared and run.pair is None and () == run.findings
    assert any("no two ranks" in sentence for sentence in run.not_looked_at)
