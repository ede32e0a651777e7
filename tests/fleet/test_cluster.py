"""A data set that is asked in pieces gives the same report: pieces in this process here, in Ray's in test_ray.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from collective_fleets import meshed, met, write_fleet, write_mesh
from fleets import FAULTS, Fault, make
from recordings import HERE

from cudatool.errors import UsageError
from cudatool.fleet import cluster
from cudatool.fleet.cluster import Cluster, Piece, answered, opened_on
from cudatool.fleet.compare import compare
from cudatool.fleet.picture import picture
from cudatool.fleet.query import opened
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


@pytest.mark.parametrize("ranks", [2, 5])
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


def test_without_ray_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(cluster, "import_module", missing)
    with (
        pytest.raises(UsageError, match=r"^--engine ray needs Ray: pip install 'cudatool\[ray\]'$"),
        cluster.ray_cluster(),
    ):
        pass
