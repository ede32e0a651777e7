"""The rank that differs is named, with what it differs in; healthy fleets are not accused."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from fleets import EXPECTED, FAULTS, Fault, make
from recordings import HERE

from cudatool.errors import UsageError
from cudatool.fleet.compare import Metric, compare, parse_limit
from cudatool.fleet.query import opened
from cudatool.fleet.report import Difference, RunReport, fleet_report

RECORDING = HERE / "prefetch__default.pickle.xz"
RANKS = 5


def report(dataset: Path) -> RunReport:
    with opened(dataset) as database:
        [run] = fleet_report(database)
    return run


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_on_one_rank_is_named(kind: str, tmp_path: Path) -> None:
    run = report(make(tmp_path, RECORDING, RANKS, [Fault(kind, 3)], seed=1))
    assert run.compared and {3} == {finding.rank for finding in run.findings}
    assert EXPECTED[kind] == run.findings[0].difference, run.findings


def test_a_healthy_fleet_has_no_findings(tmp_path: Path) -> None:
    run = report(make(tmp_path, RECORDING, RANKS, [], seed=2))
    assert run.compared and () == run.findings
    assert RANKS == len(run.ranks)


@pytest.mark.parametrize(
    ("ranks", "verdicts", "unknown"), [(5, ["could not tell", "no growth", "?"], 2), (2, ["?"], 1)]
)
def test_ranks_of_which_it_is_not_known_whether_they_leak_are_counted(
    ranks: int, verdicts: list[str], unknown: int, tmp_path: Path
) -> None:
    dataset = make(tmp_path, RECORDING, ranks, [], seed=2)
    for rank in range(ranks):
        [part] = dataset.glob(f"run=*/rank={rank}/trace=*")
        verdict = verdicts[rank] if rank < len(verdicts) else "leaks"
        table = duckdb.read_parquet(str(part / "ranks.parquet")).project(f"* REPLACE ('{verdict}' AS leak_verdict)")
        table.write_parquet(str(tmp_path / "new.parquet"))
        (tmp_path / "new.parquet").replace(part / "ranks.parquet")
    said = [sentence for sentence in report(dataset).not_looked_at if sentence.startswith("Leaks:")]
    assert [f"Leaks: for {unknown} of {ranks} ranks `cudatool leaks` could not tell; it says why."] == said


def test_faults_on_two_ranks_are_both_named(tmp_path: Path) -> None:
    run = report(make(tmp_path, RECORDING, RANKS, [Fault("size", 0), Fault("library", 4)], seed=3))
    found = {finding.rank: finding for finding in reversed(run.findings)}
    assert {0: Difference.SIZE, 4: Difference.LIBRARY} == {rank: f.difference for rank, f in found.items()}
    assert found[0].site == found[0].usual_site and found[0].value > found[0].usual > 0
    assert found[0].sequence > found[4].sequence == 0


def test_ranks_that_all_go_their_own_way_are_not_accused(tmp_path: Path) -> None:
    faults = [Fault(kind, rank) for rank, kind in enumerate(("size", "library", "order"))]
    run = report(make(tmp_path, RECORDING, 4, faults, seed=5))
    accused = {finding.difference for finding in run.findings}
    assert not accused & {Difference.SIZE, Difference.LIBRARY, Difference.ORDER}
    assert any("no majority" in sentence for sentence in run.not_looked_at)


def test_a_data_set_beside_an_older_one(tmp_path: Path) -> None:
    old = make(tmp_path / "old", RECORDING, 1, [], seed=6)
    new = make(tmp_path / "new", RECORDING, 1, [Fault("leak", 0)], seed=6)
    with opened(new, old) as database:
        found = compare(database, "old")
    changes = {change.metric: change for change in found.metrics}
    assert changes[Metric.PEAK].after > changes[Metric.PEAK].before > 0
    kept = next(site for site in found.sites if site.site == "train.py (keep_history)")
    assert 0 == kept.before < kept.after
    assert parse_limit("peak +0.01%").is_exceeded(changes[Metric.PEAK])
    assert not parse_limit("peak+10000%").is_exceeded(changes[Metric.PEAK])
    growth = changes[Metric.END].after - changes[Metric.END].before
    assert not parse_limit(f"end +{growth}B").is_exceeded(changes[Metric.END])
    assert parse_limit(f"end +{growth - 1}B").is_exceeded(changes[Metric.END])


@pytest.mark.parametrize("text", ["peak 2%", "peek +2%", "peak +", "peak +2", "+2%", "peak +2%%"])
def test_a_limit_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_limit(text)


def test_allocations_are_read_only_of_ranks_whose_checkpoints_differ(tmp_path: Path) -> None:
    dataset = make(tmp_path, RECORDING, 5, [Fault("size", 2)], seed=3)
    for rank in (3, 4):
        [part] = dataset.glob(f"run=*/rank={rank}/trace=*")
        (part / "allocations.parquet").write_bytes(b"no Parquet")
    with opened(dataset) as database:
        [run] = fleet_report(database)
    assert [(2, Difference.SIZE)] == [(one.rank, one.difference) for one in run.findings][:1]
