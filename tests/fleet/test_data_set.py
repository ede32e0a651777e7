"""Traces become parts of a data set, each once, and whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from fleet_reference import PAGE, page
from recordings import HERE

from cudatool.cli._sources import read_trace
from cudatool.errors import UsageError
from cudatool.fleet import convert as converting
from cudatool.fleet import database as fleet_database
from cudatool.fleet import query
from cudatool.fleet.convert import PART, Input, convert, named_rank, parts_of
from cudatool.fleet.query import ask, opened
from cudatool.fleet.report import fleet_report
from cudatool.fleet.schema import LAYOUT, PARTITIONS, TABLES, Column
from cudatool.fleet.tables import NULL, Tables
from cudatool.recording.identity import job_facts
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.frames import call_site
from cudatool.trace.lifetimes import blocks, segments, timeline
from cudatool.trace.model import Frame, Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "security"))
from hostile_datasets import rewrite

SMALL = HERE / "streams_default.pickle.xz"
COPY = fleet_database._copy


def killed_by_one(path: Path) -> Trace:
    """Read a trace, as other processes do; one file kills the process that reads it."""
    if "deadly" in path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return read_trace(path)


def confused_by_one(path: Path) -> Trace:
    if "bad" in path.name:
        raise ZeroDivisionError("a bug")
    return read_trace(path)


def copies(folder: Path, *names: str) -> list[Path]:
    return [Path(shutil.copy(SMALL, folder / f"{name}.pickle.xz")) for name in names]


def converted(paths: list[Path], dataset: Path, **options) -> list:
    return list(convert([Input(path, ".") for path in paths], dataset, **{"read": read_trace, "jobs": 1, **options}))


def answer(dataset: Path, question: str) -> list:
    with opened(dataset) as database:
        return list(ask(database, question).rows)


def test_one_database_writes_all_inputs_and_each_question_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new database takes as long as four tables that are written."""
    import duckdb

    made = []
    connect = duckdb.connect
    monkeypatch.setattr(
        duckdb, "connect", lambda *words, **settings: made.append(settings) or connect(*words, **settings)
    )
    fleet_database._written_from.cache_clear()
    converted(copies(tmp_path, "first"), tmp_path / "set")
    converted(copies(tmp_path, "second", "third"), tmp_path / "set")
    assert 1 == len(made)
    for count in (2, 3):
        assert [(3,)] == answer(tmp_path / "set", "SELECT count(*) FROM ranks")
        assert count == len(made)


def test_the_reference_in_the_docs_is_the_schema() -> None:
    assert page() == PAGE.read_text(), "run python tests/fleet_reference.py"


def test_files_have_the_columns_of_the_schema(five_ranks: Path) -> None:
    for table, columns in TABLES.items():
        found = answer(five_ranks, f"DESCRIBE {table}")
        assert [(c.name, c.type) for c in (*PARTITIONS, *columns)] == [row[:2] for row in found], table


def test_each_part_says_how_many_rows_its_tables_have(five_ranks: Path) -> None:
    for table in TABLES:
        counted = dict(answer(five_ranks, f"SELECT trace, count(*) FROM {table} GROUP BY trace"))
        assert {
            t: said["rows"][table] for t, (_, said) in parts_of(five_ranks).items() if said["rows"][table]
        } == counted


def test_tables_are_what_the_analysis_says(five_ranks: Path) -> None:
    trace = read_trace(HERE / "prefetch__default.pickle.xz")
    own, reserved = blocks(trace), segments(trace)
    curve = timeline(trace, own, reserved)
    peak, at_peak = answer(five_ranks, "SELECT peak_active, reserved_at_peak FROM ranks WHERE rank = 3")[0]
    assert (int(curve.active.max()), int(curve.reserved[curve.peak()])) == (peak, at_peak)
    rows = answer(
        five_ranks,
        "SELECT address, size, requested, alloc_event, free_completed_event FROM allocations WHERE rank = 3 "
        "ORDER BY allocation",
    )
    never = len(trace.records)
    ends = [None if end == never else end for end in own.end.tolist()]
    expected = zip(
        own.address.tolist(), own.size.tolist(), own.requested.tolist(), own.start.tolist(), ends, strict=True
    )
    assert list(expected) == rows
    [(held,)] = answer(five_ranks, "SELECT sum(peak_bytes) FROM sites WHERE rank = 3")
    assert peak == held
    # The highest peak of the steps, with what came before the first, is that of the whole.
    [(first, highest)] = answer(five_ranks, "SELECT min(start_time), max(peak_active) FROM steps WHERE rank = 3")
    before = curve.active[curve.time - trace.records["time"].min() < first].max()
    assert peak == max(highest, before)


def test_a_launch_of_a_graph_runs_from_its_first_operation_to_its_last() -> None:
    records = np.zeros(6, RECORD)
    kinds = (Kind.GRAPH_LAUNCH, Kind.KERNEL_LAUNCH, Kind.MEMSET) + 3 * (Kind.EXECUTION,)
    records["kind"], records["correlation"] = kinds, (7, 8, 0, 7, 7, 0)
    records["aux0"][3:], records["aux1"][3:] = (100, 130, 1), (120, 160, 2)
    kernels = Tables(Trace(records, [""], [()], [], ["main"], {"device_kind": "sim"}, [], "x")).kernels
    assert [100, 100, 130, NULL, NULL] == kernels["device_start"].tolist()
    assert [160, 120, 160, NULL, NULL] == kernels["device_end"].tolist()
    assert [False, True, True, False, False] == kernels["in_graph"].tolist()
    assert [0, 0, 0, 1, 2] == kernels["event"].tolist()


def test_a_captured_call_enqueued_nothing() -> None:
    records = np.zeros(4, RECORD)
    records["kind"] = (Kind.GRAPH_NODE_ADDED, Kind.KERNEL_LAUNCH, Kind.GRAPH_NODE_ADDED, Kind.MEMSET)
    records["correlation"] = (7, 7, 0, 0)  # the second node is of nothing, the fill has no number
    kernels = Tables(Trace(records, [""], [()], [], ["main"], {"device_kind": "sim"}, [], "x")).kernels
    assert ["MEMSET"] == kernels["kind"].tolist()


def test_call_sites_are_written_as_elsewhere() -> None:
    stacks = [
        (Frame("/env/lib/python3.11/site-packages/lib/ops.py", "empty", 7), Frame("/home/me/a/train.py", "step", 12)),
        (Frame("/home/me/rank.py", "<module>", 6),),
    ]
    frames = [frame for stack in stacks for frame in stack]
    records = np.zeros(3, RECORD)
    records["kind"], records["size"], records["aux0"] = Kind.BLOCK_ALLOC, 512, 512
    records["address"], records["stack"] = (512, 1024, 2048), (1, 2, 0)
    trace = Trace(records, [""], [(), (0, 1), (2,)], frames, ["main"], {"device_kind": "cuda"}, [], "x")
    rows = Tables(trace).allocations["site"].tolist()
    assert ["train.py:12 (step)", "rank.py:6 (<module>)"] == rows[:2]
    assert ["train.py:12 (step) via ops.py:7 (empty)", rows[1]] == [call_site(stack) for stack in stacks]


def test_parts_without_a_column_that_was_added_later_have_null(
    five_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Path(shutil.copytree(five_ranks, tmp_path / "set"))
    next_ = LAYOUT + 1
    newer = {
        **TABLES,
        "ranks": (
            *TABLES["ranks"],
            Column("colour", "VARCHAR", "of the rank", next_),
            Column("later", "BIGINT", "", next_),
        ),
    }
    monkeypatch.setattr(query, "TABLES", newer)
    monkeypatch.setattr(query, "LAYOUT", next_)
    assert [(5, 0, 0)] == answer(dataset, "SELECT count(*), count(colour), count(later) FROM ranks")
    for rank in (0, 4):
        [part] = dataset.glob(f"run=*/rank={rank}/trace=*")
        rewrite(part / "ranks.parquet", "SELECT *, 'red' AS colour FROM old")
        said = json.loads((part / PART).read_text())
        assert LAYOUT == said["layout"]
        (part / PART).write_text(json.dumps({**said, "layout": next_}))
    rows = answer(dataset, "SELECT rank, colour, later, peak_active > 0 FROM ranks ORDER BY rank")
    assert [(rank, "red" if rank in (0, 4) else None, None, True) for rank in range(5)] == rows
    with opened(dataset) as database:
        assert 5 == len(fleet_report(database)[0].ranks)


def test_memory_of_a_librarys_pool_has_its_name_and_older_parts_say_nothing_of_it(tmp_path: Path) -> None:
    records = np.zeros(4, RECORD)
    records["kind"] = (Kind.SEGMENT_ALLOC, Kind.BLOCK_ALLOC, Kind.MEM_ALLOC, Kind.POOL_ALLOC)
    records["address"], records["size"], records["name"] = (512, 512, 8192, 8192), (512, 512, 4096, 1024), (0, 0, 0, 1)
    trace = Trace(records, ["", "CuPy"], [()], [], ["main"], {"device_kind": "cuda"}, [], "x")
    dataset = tmp_path / "set"
    converted(copies(tmp_path, "one"), dataset, read=lambda path: trace)
    tables = ("allocations", "segments")
    named = [f"SELECT address, library FROM {table} ORDER BY address" for table in tables]
    assert [[(512, None), (8192, "CuPy")]] * 2 == [answer(dataset, one) for one in named]
    [part] = dataset.glob("run=*/rank=*/trace=*")
    for table in tables:
        rewrite(part / f"{table}.parquet", "SELECT * EXCLUDE (library) FROM old")
    (part / PART).write_text(json.dumps({**json.loads((part / PART).read_text()), "layout": 1}))
    assert [[(512, None), (8192, None)]] * 2 == [answer(dataset, one) for one in named]


def test_memory_without_an_address_has_a_column_of_its_own_and_is_said_to_be_left_out(tmp_path: Path) -> None:
    def recorded(path: Path) -> Trace:
        records = np.zeros(4, RECORD)
        records["kind"] = (Kind.BLOCK_ALLOC, Kind.PHYSICAL_ALLOC, Kind.PHYSICAL_ALLOC, Kind.PHYSICAL_FREE)
        records["size"], records["aux0"] = (512, 2 << 20, (2 if "rank1" in path.name else 4) << 20, 0), (512, 7, 8, 7)
        return Trace(records, [""], [()], [], ["main"], {"device_kind": "sim"}, [], str(path))

    dataset = tmp_path / "set"
    converted(copies(tmp_path, "rank0", "rank1", "rank2"), dataset, read=recorded)
    mib = [(0, 6), (1, 4), (2, 6)]
    assert mib == answer(dataset, "SELECT rank, physical_peak // 1048576 FROM ranks ORDER BY rank")
    with opened(dataset) as database:
        (run,) = fleet_report(database)
    said = "Memory from cuMemCreate, which no figure counts: from 4 MiB to 6 MiB at its highest, the most on rank 0."
    assert said in run.not_looked_at


def test_a_column_that_every_layout_has_is_never_left_out(
    five_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Path(shutil.copytree(five_ranks, tmp_path / "set"))
    for table in dataset.glob("run=*/rank=*/trace=*/ranks.parquet"):
        rewrite(table, "SELECT * EXCLUDE (notes) FROM old")
    for layout in (LAYOUT, LAYOUT + 1):
        monkeypatch.setattr(query, "LAYOUT", layout)
        with pytest.raises(UsageError, match="the table ranks of"):
            answer(dataset, "FROM ranks")


def test_equal_recordings_have_equal_hashes_and_others_do_not(five_ranks: Path) -> None:
    last = answer(
        five_ranks,
        "SELECT arg_max(own_hash, sequence), arg_max(full_hash, sequence) FROM checkpoints GROUP BY rank ORDER BY rank",
    )
    assert last[0] == last[1] == last[2] != last[3]
    stacks = answer(five_ranks, "SELECT count(DISTINCT stack), count(DISTINCT trace) FROM stacks WHERE rank < 3")
    names = {len(read_trace(SMALL).stack(i)) for i in range(len(read_trace(SMALL).stacks))}
    assert stacks[0][1] == 3 and stacks[0][0] >= len(names - {0})


def test_an_input_is_converted_once_unless_it_changes(tmp_path: Path) -> None:
    [path, other] = copies(tmp_path, "rank0", "rank1")
    dataset = tmp_path / "set"
    assert 2 == len(converted([path, other], dataset))
    assert [] == converted([path, other], dataset)
    os.utime(path, ns=(1, 1))
    assert [path] == [outcome.path for outcome in converted([path, other], dataset)]
    assert 2 == len(parts_of(dataset)) == len(list(dataset.glob("run=*/rank=*/trace=*")))
    assert 2 == len(converted([path, other], dataset, again=True))
    assert 2 == len(converted([path, other], dataset, run="named"))
    assert ["named"] * 2 == [said["run"] for _, said in parts_of(dataset).values()]
    assert [] == list(dataset.glob(".part-*"))


def test_a_half_written_part_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = copies(tmp_path, "rank0", "rank1")
    dataset = tmp_path / "set"

    def interrupted(*arguments: object) -> None:
        write(*arguments)
        if arguments[2] == "allocations":
            raise KeyboardInterrupt

    write = converting.write_table
    with monkeypatch.context() as patch:
        patch.setattr(converting, "write_table", interrupted)
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # as if the process were killed
        with pytest.raises(KeyboardInterrupt):
            converted(paths, dataset)
    assert list(dataset.glob(".part-*/ranks.parquet")) and not parts_of(dataset)
    with pytest.raises(UsageError, match="no data set"), opened(dataset):
        pass
    assert 2 == len(converted(paths, dataset))
    assert [(2,)] == answer(dataset, "SELECT count(*) FROM ranks")
    assert [] == list(dataset.glob(".part-*"))


@pytest.mark.parametrize(
    ("names", "says"), [((), "TRACES --to parquet -o {0}`"), (("a",), "{0} --to parquet -o DATASET`")]
)
def test_folder_that_is_no_data_set_is_refused_with_the_command_that_makes_one(
    tmp_path: Path, names: tuple[str, ...], says: str
) -> None:
    copies(tmp_path, *names)
    with pytest.raises(UsageError) as raised, opened(tmp_path):
        pass
    assert str(raised.value).endswith(says.format(tmp_path))


def test_a_bad_input_costs_only_itself(tmp_path: Path) -> None:
    paths = copies(tmp_path, "bad", "rank1")
    broken = tmp_path / "rank2.ctrace"
    broken.write_bytes(b"\x93CTRACE" + bytes(100))
    outcomes = converted([*paths, broken], tmp_path / "set", read=confused_by_one)
    assert [True, False, True] == [bool(outcome.error) for outcome in outcomes]
    assert "internal error: ZeroDivisionError: a bug" == outcomes[0].error
    assert [(1,)] == answer(tmp_path / "set", "SELECT rank FROM ranks")


def test_names_that_are_no_utf_8_become_a_part_and_are_refused_as_a_data_sets(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    [done] = converted(copies(folder, "a"), tmp_path / "set")
    assert "" == done.error
    assert [("caf?", str(folder / "a.pickle.xz"))] == [
        (said["run"], said["source"]) for _, said in parts_of(tmp_path / "set").values()
    ]
    assert [("caf?",)] == answer(tmp_path / "set", "SELECT run FROM ranks")
    with pytest.raises(UsageError, match="needs a name in UTF-8"):
        converted(copies(tmp_path, "a"), folder / "set")


def test_a_file_that_cannot_be_written_is_no_internal_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_database, "_copy", lambda database, selected, path: COPY(database, selected, path / "no"))
    [done] = converted(copies(tmp_path, "a"), tmp_path / "set")
    assert done.error.startswith("DuckDB cannot write ")


def test_an_input_that_kills_its_process_costs_only_itself(tmp_path: Path) -> None:
    paths = copies(tmp_path, "rank0", "deadly1", "rank2")
    outcomes = converted(paths, tmp_path / "set", read=killed_by_one, jobs=2)
    failed = {outcome.path: outcome.error for outcome in outcomes if outcome.error}
    assert {paths[1]: "the process that converted it was killed"} == failed
    assert sorted(paths) == sorted(outcome.path for outcome in outcomes)
    assert [(2,)] == answer(tmp_path / "set", "SELECT count(*) FROM ranks")


def test_one_process_at_a_time_writes_to_a_data_set(tmp_path: Path) -> None:
    [path] = copies(tmp_path, "rank0")
    with converting._locked(tmp_path / "set"), pytest.raises(UsageError, match="another process"):
        converted([path], tmp_path / "set")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.pickle", 3),
        ("snapshot_rank-12.pickle.xz", 12),
        ("Rank_007.csv", 7),
        ("rank1/rank2.pickle", 2),
        ("rank=5/snapshot.pickle", 5),
        ("franks3.pickle", None),
        ("frank3.pickle", None),
        ("snapshot3.pickle", None),
        ("rank.pickle", None),
    ],
)
def test_rank_of_a_file_name(name: str, rank: int | None) -> None:
    assert rank == named_rank(Path("rank9/runs") / name)


def test_job_facts_come_from_the_launcher() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "812", "RANK": "what"}
    facts = job_facts(torchrun)
    assert facts.pop("host") == os.uname().nodename
    assert {"rank": "5", "world_size": "16", "local_rank": "1"} == facts
    assert ("2", "812") == (job_facts(slurm)["rank"], job_facts(slurm)["job"])
    assert {"host"} == job_facts({"SLURM_JOB_ID": "812"}).keys()


def test_part_says_what_it_was_made_of(five_ranks: Path) -> None:
    folder, said = next(iter(parts_of(five_ranks).values()))
    assert json.loads((folder / PART).read_text()) == said
    assert said["source"].endswith("rank0.pickle.xz") and said["rank"] == 0
    assert said["run"] == Path(said["source"]).parent.name


def test_a_device_of_which_every_request_failed_has_a_row() -> None:
    records = np.zeros(2, RECORD)
    records["kind"], records["device"], records["size"] = Kind.OOM, 1, 1 << 40
    ranks = Tables(Trace(records)).ranks
    assert ([1], [2], [0]) == tuple(ranks[name].tolist() for name in ("device", "ooms", "allocations"))
