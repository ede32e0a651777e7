"""A data set that is asked in pieces gives the same report: pieces in this process here, in Ray's in test_ray.py."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from collective_fleets import meshed, met, write_fleet, write_mesh
from fleets import FAULTS, Fault, make
from recordings import HERE

from cudatool.errors import UsageError
from cudatool.fleet import cluster
from cudatool.fleet.cluster import Cluster, Piece, answered, asked_on, opened_on
from cudatool.fleet.compare import compare
from cudatool.fleet.picture import picture
from cudatool.fleet.query import ask, opened
from cudatool.fleet.report import RunReport, fleet_report

RECORDING = HERE / "prefetch__default.pickle.xz"


class Here:
    """Answers pieces in this process, and keeps which there were."""

    def __init__(self, workers: int) -> None:
        self.pieces: list[Piece] = []
        self.cluster = Cluster(workers, self.answers)

    def answers(self, pieces: Sequence[Piece]) -> list[dict[str, bytes]]:
        self.pieces += pieces
        return [answered(piece) for piece in pieces]


def both(dataset: Path, *, workers: int = 1) -> tuple[tuple[RunReport, ...], tuple[RunReport, ...], Here]:
    here = Here(workers)
    with opened(dataset) as database:
        expected = fleet_report(database)
    with opened_on(here.cluster, dataset) as (database, keep):
        return expected, fleet_report(database, keep), here


@pytest.mark.some_of("ranks", [2, 5], 1)
@pytest.mark.parametrize("kind", ["leak", "size", "library", "not-freed", "straggler"])
def test_pieces_give_the_same_report(kind: str, ranks: int, tmp_path: Path) -> None:
    assert kind in FAULTS
    dataset = make(tmp_path, RECORDING, ranks, [Fault(kind, 1)], seed=1)
    expected, found, here = both(dataset)
    assert expected == found and found[0].has_differences
    assert min(ranks, 4) == sum("ranks" in piece.questions for piece in here.pieces)


def test_each_piece_reads_its_own_parts_and_those_of_the_reference(tmp_path: Path) -> None:
    dataset = make(tmp_path, RECORDING, 6, [Fault("size", 5)], seed=2)
    _, _, here = both(dataset, workers=2)
    every = {part.parent for part in dataset.glob("run=*/rank=*/trace=*/part.json")}
    first = [piece.parts for piece in here.pieces if "ranks" in piece.questions]
    assert 6 == len(first) and every == {part for parts in first for part in parts}
    asked = [piece for piece in here.pieces if "differing" in piece.questions]
    reference = f"rank={asked[0].values['rank']}"
    assert all(any(part.parent.name == reference for part in piece.parts) for piece in asked)
    assert {1, 2} == {len(piece.parts) for piece in asked} and {1, 2} >= {len(piece.members) for piece in asked}


def test_collectives_are_compared_over_pieces(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    work = (2e6 * chance.uniform(0.95, 1.05, (8, 60))).astype(np.int64)
    work[5] *= 2
    kernels = write_fleet(tmp_path / "kernels", *met(work, np.full(60, 400_000)))
    for dataset in (kernels, write_mesh(tmp_path / "mesh", meshed((2, 4), (1, 1, 0), work, 300_000))):
        expected, found, _ = both(dataset)
        assert expected == found and [5] == [finding.rank for finding in found[0].findings]


def test_pages_and_comparisons_are_the_same(five_ranks: Path, tmp_path: Path) -> None:
    with opened(five_ranks, five_ranks) as database:
        [run] = fleet_report(database)
        expected = picture(database, run), compare(database, "old")
    with opened_on(Here(1).cluster, five_ranks, five_ranks) as (database, keep):
        [run] = fleet_report(database, keep)
        found = picture(database, run), compare(database, "old")
    assert expected[1] == found[1] and expected[0].sites == found[0].sites
    assert np.array_equal(expected[0].memory.peak, found[0].memory.peak)
    assert expected[0].report == found[0].report


def test_a_link_out_of_the_data_set_is_refused_by_the_task_too(five_ranks: Path, tmp_path: Path) -> None:
    part = next(five_ranks.glob("run=*/rank=0/trace=*")).resolve()
    outside = tmp_path / "outside.parquet"
    outside.write_bytes((part / "ranks.parquet").read_bytes())
    link = part / "link.parquet"
    link.symlink_to(outside)
    try:
        with pytest.raises(UsageError, match="leads out of the data set"):
            answered(Piece(five_ranks.resolve(), (part,), "1GiB", {"ranks": "FROM ranks"}))
    finally:
        link.unlink()


QUESTIONS = [
    "FROM ranks",
    "SELECT rank, site, size / 2 AS half FROM allocations WHERE size > 1e6 AND site LIKE '%py%'",
    "SELECT * EXCLUDE (step), CASE WHEN size > 512 THEN 'large' END AS c FROM allocations a WHERE a.device IN (0, 1)",
    "SELECT rank, count(*), sum(size), max(site) FILTER (size > 512) FROM allocations GROUP BY rank HAVING count(*) > 1",
    "SELECT trace, kind, count(DISTINCT stream) FROM events GROUP BY ALL",
    "SELECT a.rank, upper(site) AS s, sum(bytes) FROM sites AS a GROUP BY a.rank, s;",
    "SELECT size, size, site AS size FROM allocations WHERE size > 1_000_000",
    "SELECT rank, list(size::HUGEINT ORDER BY size), INTERVAL 3 MICROSECOND, [rank, 1], {'a': rank}, DATE '2026-01-02', "
    "TIMESTAMP_NS '2026-01-02 03:04:05.123456789', 1.5::DECIMAL(38, 2), 'x'::BLOB FROM segments GROUP BY rank",
    "SELECT CAST(never_freed AS VARCHAR) || 'x' FROM sites WHERE peak_bytes BETWEEN 1 AND 1 << 30 -- all of them",
]
NOT_IN_PIECES = [
    "SELECT count(*) FROM ranks",
    "SELECT site, sum(bytes) FROM sites GROUP BY site",
    "SELECT site FROM sites GROUP BY ALL",
    "SELECT site FROM sites GROUP BY site",
    "SELECT DISTINCT site FROM sites",
    "SELECT site FROM sites ORDER BY bytes LIMIT 3",
    "SELECT device AS rank, count(*) FROM sites GROUP BY rank",
    "SELECT rank, count(*) FROM sites GROUP BY ROLLUP (rank)",
    "SELECT rank, sum(bytes) OVER () FROM sites",
    "SELECT rank FROM sites QUALIFY row_number() OVER (ORDER BY bytes) = 1",
    "SELECT rank, (SELECT max(bytes) FROM sites) FROM ranks",
    "SELECT * FROM ranks JOIN steps USING (trace)",
    "SELECT * FROM ranks, steps",
    "WITH a AS (FROM ranks) FROM a",
    "FROM ranks UNION ALL FROM ranks",
    "FROM (FROM ranks)",
    "SELECT rank, count(*) FROM ranks t(rank) GROUP BY rank",
    "FROM ranks USING SAMPLE 1",
    "FROM ranks TABLESAMPLE 50%",
    "SELECT geometric_mean(bytes) FROM sites",
    "SELECT unnest([1, 2]) FROM ranks",
    "SELECT 1",
    "DESCRIBE ranks",
    "SHOW TABLES",
    "SUMMARIZE ranks",
    "VALUES (1)",
    "FROM range(3)",
    "SELECT 1; SELECT 2",
    "COPY ranks TO 'x.csv'",
    "SELECT no_column FROM ranks",
    "SELECT '\udcff' FROM ranks",
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_in_pieces_has_the_same_rows(question: str, five_ranks: Path) -> None:
    with opened(five_ranks) as database:
        expected = ask(database, question)
        rows = sorted(map(repr, expected.rows))
    here = Here(1)
    with asked_on(here.cluster, five_ranks, question) as found:
        assert (expected.columns, expected.types) == (found.columns, found.types)
        assert rows == sorted(map(repr, found.rows)) and rows
    assert 4 == len(here.pieces)


@pytest.mark.parametrize("question", NOT_IN_PIECES)
def test_a_question_that_needs_all_parts_at_once_is_refused(question: str, five_ranks: Path) -> None:
    with pytest.raises(UsageError) as raised, asked_on(Here(1).cluster, five_ranks, question):
        pass
    assert "\n" not in str(raised.value)


def test_grouping_by_rank_is_over_all_runs(tmp_path: Path) -> None:
    """A rank of two runs is in one piece."""
    dataset = make(tmp_path, RECORDING, 3, [], seed=1)
    [run] = dataset.glob("run=*")
    shutil.copytree(run, dataset / "run=again")
    question = "SELECT rank, count(*) FROM ranks GROUP BY rank"
    with asked_on(Here(4).cluster, dataset, question) as found:
        assert [(0, 2), (1, 2), (2, 2)] == sorted(found.rows)


def test_without_ray_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(cluster, "import_module", missing)
    with (
        pytest.raises(UsageError, match=r"^--engine ray needs Ray: pip install 'cudatool\[ray\]'$"),
        cluster.ray_cluster(),
    ):
        pass
