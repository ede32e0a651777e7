"""`export --to parquet` and `query`, from the recording of several ranks to the answer."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "viz"))
from twin import payload_of, unpack

from cudatool.trace import hooks
from cudatool.trace.events import Kind
from cudatool.trace.recorder import Recorder

DATA = Path(__file__).resolve().parents[1] / "data"
RANKS = """
import os, subprocess, sys
import cudatool as ct
if sys.argv[1:]:
    kept = [ct.zeros(1000 * (1 + int(os.environ["RANK"]))) for _ in range(3)]
else:
    for rank in ("0", "1"):
        job = os.environ | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        subprocess.run([sys.executable, __file__, "child"], env=job, check=True)
"""


@pytest.fixture(autouse=True)
def needs_duckdb() -> None:
    if importlib.util.find_spec("duckdb") is None:
        pytest.skip("needs DuckDB (cudatool[fleet])")


def test_ranks_that_a_recorded_program_started_belong_together(run_warm, run_here, tmp_path):
    (tmp_path / "launch.py").write_text(RANKS)
    assert run_warm("run", "-o", "job.ctrace", "launch.py").returncode == 0
    done = run_here("export", "job.ctrace", "--to", "parquet", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "Wrote 3 parts of job.dataset" in done.stderr
    question = "SELECT run, rank, world_size, local_rank, is_child, host IS NULL, format FROM ranks ORDER BY rank"
    answer = json.loads(run_here("query", "job.dataset", question, "--json").stdout)
    child = [["job", rank, 2, rank, True, False, "cudatool"] for rank in (0, 1)]
    assert [*child, ["job", None, None, None, False, False, "cudatool"]] == answer["rows"]
    sizes = run_here("query", "job.dataset", "SELECT rank, requested FROM allocations ORDER BY 1", "--format", "csv")
    assert ["rank,requested", *["0,4000"] * 3, *["1,8000"] * 3] == sizes.stdout.splitlines()


def test_a_rank_in_the_environment_is_in_the_header_of_the_program(run_warm, run_here, tmp_path):
    (tmp_path / "work.py").write_text("import cudatool as ct; x = ct.zeros(10)")
    job = {"RANK": "7", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "nightly"}
    assert run_warm("run", "-o", "work.ctrace", "work.py", environment=job).returncode == 0
    assert run_here("export", "work.ctrace", "--to", "parquet").returncode == 0
    found = run_here("query", "work.dataset", "SELECT run, rank, world_size FROM ranks", "--format", "csv")
    assert ["run,rank,world_size", "nightly,7,8"] == found.stdout.splitlines()


def test_a_directory_is_converted_and_bad_files_are_named(run_here, tmp_path):
    nights = [tmp_path / "in" / night for night in ("first", "second")]
    for night in nights:
        night.mkdir(parents=True)
        shutil.copy(DATA / "streams_default.pickle.xz", night / "rank0.pickle.xz")
    (nights[1] / "rank1.ctrace").write_text("no trace")
    (nights[1] / "table.csv").write_text("a,b\n1,2\n")
    (nights[1] / "rmm.csv").write_text(
        "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00:000001,allocate,0x7f0000000000,1024,0x0\n"
    )
    for _ in range(2):
        done = run_here("export", "in", "--to", "parquet", "-o", "in/set", "--jobs", "1")
        assert done.returncode == 2
        named = [line for line in done.stderr.splitlines() if line.startswith("not converted: ")]
        assert len(named) == 1 and "in/second/rank1.ctrace" in named[0]
    assert "Wrote 0 parts of in/set (0 events; 3 unchanged)" in done.stderr
    found = run_here("query", "in/set", "SELECT run, rank, format FROM ranks ORDER BY ALL", "--format", "csv")
    assert ["run,rank,format", "first,0,torch", "second,0,torch", "second,,rmm"] == found.stdout.splitlines()


def test_fleet_names_the_rank_that_differs(run_here, tmp_path):
    (tmp_path / "in").mkdir()
    for rank in range(4):
        name = "prefetch__default" if rank == 2 else "streams_default"
        shutil.copy(DATA / f"{name}.pickle.xz", tmp_path / "in" / f"rank{rank}.pickle.xz")
    assert run_here("export", "in", "--to", "parquet", "-o", "set", "--jobs", "1").returncode == 0
    done = run_here("fleet", "set")
    assert (1, "") == (done.returncode, done.stderr)
    assert "Run in: 4 ranks" in done.stdout and "rank 2: peak of 712.29 MiB, median 22.5 MiB" in done.stdout
    assert "Not looked at: Stragglers and clocks" in done.stdout
    run = json.loads(run_here("fleet", "set", "--json").stdout)["runs"][0]
    assert {2} == {finding["rank"] for finding in run["findings"]}


def test_a_trace_without_a_rank_is_counted(run_here, tmp_path):
    shutil.copy(DATA / "streams_default.pickle.xz", tmp_path / "one.pickle.xz")
    assert 0 == run_here("export", "one.pickle.xz", "--to", "parquet", "-o", "set").returncode
    done = run_here("fleet", "set")
    assert "Not looked at: 1 trace without a rank or without device memory." in done.stdout


def test_a_trace_of_two_devices_without_a_rank_is_one_trace(run_warm, run_here, tmp_path):
    (tmp_path / "a.py").write_text("import cudatool as ct\nkept = [ct.zeros(8, device=device) for device in (0, 1)]\n")
    done = run_warm("run", "--device", "sim:count=2", "-o", "a.ctrace", "a.py")
    assert done.returncode == 0, done.stderr
    assert 0 == run_here("export", "a.ctrace", "--to", "parquet", "-o", "set").returncode
    assert "Not looked at: 1 trace without a rank" in run_here("fleet", "set").stdout


RANK_OF_TWO = """
import os
import numpy as np
import cudatool as ct

def step(number):
    larger = int(os.environ["RANK"]) and number >= int(os.environ["FROM"])
    kept = [ct.zeros(1 << 16, np.float32), ct.zeros(1 << (19 if larger else 18), np.float32)]
    ct.synchronize()

for number in range(6):
    with ct.range("step"):
        step(number)
"""


@pytest.mark.parametrize("since", [3, 99])
def test_two_recorded_ranks_differ_in_the_step_and_at_the_line(run_warm, run_here, tmp_path, since):
    (tmp_path / "train.py").write_text(RANK_OF_TWO)
    (tmp_path / "in").mkdir()
    for rank in range(2):
        job = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "FROM": since}
        environment = {name: str(value) for name, value in job.items()}
        done = run_warm("run", "-o", f"in/rank{rank}.ctrace", "train.py", environment=environment)
        assert done.returncode == 0, done.stderr
    assert run_here("export", "in", "--to", "parquet", "-o", "set", "--jobs", "1").returncode == 0
    done = run_here("fleet", "set", "--json")
    [run] = json.loads(done.stdout)["runs"]
    found = {one["difference"]: one for one in run["pair"]["differences"] if one["difference"] in ("size", "peak")}
    if since > 6:
        assert ({}, []) == (found, run["pair"]["memory"])
        return
    assert 1 == done.returncode and [] == run["findings"]
    assert ["train.py:8 (step)"] * 2 == found["size"]["sites"] and [1 << 20, 1 << 21] == found["size"]["values"]
    assert [since, since] == found["size"]["steps"] and 2 * since + 1 == found["size"]["sequence"]
    assert {"by": "site", "name": "train.py:8 (step)", "bytes": [1310720, 2359296]} in run["pair"]["memory"]
    words = "train.py:8 (step): rank 0 requests 1 MiB, rank 1 2 MiB"
    assert f"size: from allocation 7 on (step 3), {words}" in " ".join(run_here("fleet", "set").stdout.split())


def test_fleet_writes_the_page_of_its_runs(run_here, tmp_path):
    for run, names in (("first", ["streams_default"] * 3), ("second", ["streams_default"] * 3 + ["prefetch__default"])):
        (tmp_path / "in" / run).mkdir(parents=True)
        for rank, name in enumerate(names):
            shutil.copy(DATA / f"{name}.pickle.xz", tmp_path / "in" / run / f"rank{rank}.pickle.xz")
    assert run_here("export", "in", "--to", "parquet", "-o", "set", "--jobs", "1").returncode == 0
    done = run_here("fleet", "set", "--against", "set", "--html", "fleet.html", "--json")
    assert done.returncode == 1 and "Wrote fleet.html (" in done.stderr
    printed = json.loads(done.stdout)
    document = unpack(payload_of((tmp_path / "fleet.html").read_text()))
    assert "set" == document["source"] and document["against"]["metrics"]
    for run, page in zip(printed["runs"], document["runs"], strict=True):
        assert run["run"] == page["run"]
        assert [finding["rank"] for finding in run["findings"]] == [finding["rank"] for finding in page["findings"]]
        assert [rank["peak_active"] for rank in run["ranks"]] == page["ranks"]["peak"]
        # Each rank's highest step is at most its peak, which may lie before the first step.
        cells = page["memory"]["peak"]
        columns = len(cells) // len(run["ranks"])
        for row, rank in enumerate(run["ranks"]):
            assert 0 < max(cells[row * columns : (row + 1) * columns]) <= rank["peak_active"]
    sites = [site for site in document["runs"][1]["sites"] if site["rank"] == 3]
    assert sites and sum(site["bytes"] for site in sites) <= document["runs"][1]["ranks"]["peak"][3]
    again = run_here("fleet", "set", "--html", "fleet.html")
    assert (2, "") == (again.returncode, again.stdout) and "fleet.html" in again.stderr
    assert run_here("fleet", "set", "--open").returncode == 2


def test_fleet_that_cannot_be_compared_is_not_called_clean(run_here):
    assert run_here("export", DATA / "streams_default.pickle.xz", "--to", "parquet", "-o", "set").returncode == 0
    done = run_here("fleet", "set")
    assert done.returncode == 4
    assert "Could not tell" in done.stdout and "No rank differs" not in done.stdout


def test_fleet_gate_fails_on_growth_alone(run_here):
    for name in ("streams_default", "prefetch__default"):
        assert run_here("export", DATA / f"{name}.pickle.xz", "--to", "parquet", "-o", name).returncode == 0
    gate = ("--against", "streams_default", "--fail-on")
    assert 1 == run_here("fleet", "prefetch__default", *gate, "peak +2%").returncode
    assert 0 == run_here("fleet", "prefetch__default", *gate, "peak +1GiB").returncode
    assert 0 == run_here("fleet", "streams_default", *gate, "peak +0%", "--fail-on", "reserved +0%").returncode
    for words in ((*gate, "peak 2%"), ("--fail-on", "peak +2%")):
        done = run_here("fleet", "prefetch__default", *words)
        assert (2, "") == (done.returncode, done.stdout)


def test_fleet_gate_does_not_pass_what_is_not_known(run_here, tmp_path):
    log = "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00:000001,allocate,0x7f0000000000,1024,0x0\n"
    (tmp_path / "rmm.csv").write_text(log)
    assert run_here("export", "rmm.csv", "--to", "parquet", "-o", "set").returncode == 0
    done = run_here("fleet", "set", "--against", "set", "--fail-on", "reserved +2%")
    assert done.returncode == 2 and "not known in both" in done.stderr


@pytest.mark.parametrize(
    ("keep", "status", "said"),
    [
        (1.0, 0, ""),
        (0.6, 2, "1 trace ended early or ran out of memory"),
        (None, 2, "1 rank of the older data set left no trace"),
    ],
)
def test_fleet_gate_does_not_pass_ranks_that_did_not_finish(run_here, tmp_path, keep, status, said):
    """Whatever they would have taken later is not known."""
    with Recorder(tmp_path / "whole.ctrace", header={"world_size": "64"}):  # of which two are recorded
        for number in range(2000):
            hooks.emit(Kind.MEM_ALLOC, device=0, address=1 << 32 | number << 12, size=512)
    whole = (tmp_path / "whole.ctrace").read_bytes()
    for name, share in (("old", 1.0), ("new", keep)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.ctrace").write_bytes(whole)
        if share is not None:
            (tmp_path / name / "rank1.ctrace").write_bytes(whole[: int(len(whole) * share)])
        assert run_here("export", name, "--to", "parquet", "-o", f"{name}.set", "--run", "r").returncode == 0
    done = run_here("fleet", "new.set", "--against", "old.set", "--fail-on", "peak +0%")
    assert (status, said) == (done.returncode, said if said in done.stderr else done.stderr)


def test_several_processes_convert(run_warm, run_here, tmp_path):
    for rank in range(3):
        shutil.copy(DATA / "streams_default.pickle.xz", tmp_path / f"rank{rank}.pickle.xz")
    done = run_warm("export", ".", "--to", "parquet", "-o", "set", "--jobs", "2", environment={"A": "b"})
    assert (0, "") == (done.returncode, done.stdout), done.stderr
    assert "Wrote 3 parts" in done.stderr


def test_other_formats_take_one_source(run_here, tmp_path):
    path = DATA / "streams_default.pickle.xz"
    for words in ((path, path), (path, "--run", "x"), (path, "--jobs", "2")):
        done = run_here("export", *words, "--to", "sqlite", "-o", "x.sqlite")
        assert done.returncode == 2 and "--to parquet only" in done.stderr
    done = run_here("export", path, "--to", "parquet", "--events", "1:2")
    assert done.returncode == 2 and "whole traces" in done.stderr


def test_without_duckdb_one_line_says_what_to_install(run_here, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    for words in (
        ("export", DATA / "streams_default.pickle.xz", "--to", "parquet", "-o", "x"),
        ("query", ".", "SELECT 1"),
    ):
        done = run_here(*words)
        assert (2, "") == (done.returncode, done.stdout)
        assert ["cudatool: error: this needs DuckDB: pip install 'cudatool[fleet]'"] == done.stderr.splitlines()


def test_a_question_that_cannot_be_answered_is_one_line(run_here):
    path = DATA / "streams_default.pickle.xz"
    assert run_here("export", path, "--to", "parquet", "-o", "set").returncode == 0
    for question in ("SELEC 1", "SELECT x FROM ranks", "COPY ranks TO 'x.csv'", "SELECT * FROM '/etc/passwd'"):
        done = run_here("query", "set", question)
        assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines())), done.stderr
    done = run_here("query", "set", "SELECT range AS n FROM range(1500)")
    assert "more than 1,000 rows" in done.stdout
    assert 1501 == len(
        run_here("query", "set", "SELECT range AS n FROM range(1500)", "--format", "csv").stdout.splitlines()
    )


def test_rows_of_more_columns_than_a_terminal_has_room_for_are_below_each_other(run_here):
    """Columns of one letter each, a hundred lines high, were no answer, and took seconds for long texts."""
    path = DATA / "streams_default.pickle.xz"
    assert run_here("export", path, "--to", "parquet", "-o", "set").returncode == 0
    lines = run_here("query", "set", "FROM ranks UNION ALL FROM ranks").stdout.splitlines()
    assert "Row 1" == lines[0] and 2 == lines.count("  format            torch") and 1 == lines.count("")
    assert ["run  rank  trace", "No rows."] == [
        " ".join(run_here("query", "set", question).stdout.splitlines()[:1])
        for question in ("SELECT run, rank, trace FROM ranks WHERE rank = 7", "FROM ranks WHERE rank = 7")
    ]
    wide = run_here("query", "set", "SELECT run, device, source, format FROM ranks").stdout.splitlines()
    assert ["run", "device", "source", "format"] == wide[0].split()
