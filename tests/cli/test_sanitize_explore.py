"""`cudatool sanitize --witness` and `--explore`, as users run them."""

from __future__ import annotations

import json
import time

import pytest

from cudatool.cli import _schedules
from cudatool.cli._proof import Proof
from cudatool.errors import CudatoolError
from cudatool.recording import record

_RACY = """
import numpy as np
import cudatool as ct
x = ct.zeros(64, np.float32)
ct.synchronize()
a, b = ct.Stream(), ct.Stream()
with ct.stream(a): x.fill_(1)
with ct.stream(b): x.fill_(2)
ct.synchronize()
print("now", x.get()[0])
"""
_FAILS_LATE = """
import numpy as np
import cudatool as ct
x, y = ct.zeros(64, np.float32), ct.zeros(64, np.float32)
ct.synchronize()
a, b = ct.Stream(), ct.Stream()
with ct.stream(a): x.fill_(1)
with ct.stream(b): y.copy_(x)
ct.synchronize()
if y.get()[0] != 1:
    raise SystemExit("the copy came first")
"""
_CLEAN = """
import os
print("process", os.getpid())
print("the end")
"""


@pytest.fixture
def racy(tmp_path):
    (tmp_path / "racy.py").write_text(_RACY)
    return "racy.py"


def test_witness_shows_two_orders_and_the_bytes(run_warm, racy):
    done = run_warm("sanitize", "--witness", racy)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "differ in what cuMemcpyDtoHAsync (racy.py:10) copies to the host" in " ".join(done.stdout.split())
    assert [line.strip() for line in lines if line.strip().startswith("*")] == [
        "* cuMemsetD32Async on stream 2 (racy.py:7)",
        "* cuMemsetD32Async on stream 3 (racy.py:8)",
        "* cuMemsetD32Async on stream 3 (racy.py:8)",
        "* cuMemsetD32Async on stream 2 (racy.py:7)",
    ]
    assert "00 00 00 40" in done.stdout
    assert "00 00 80 3f" in done.stdout


def test_witness_is_part_of_the_json_report(run_warm, racy):
    report = json.loads(run_warm("sanitize", "--witness", "--json", racy).stdout)
    (finding,) = report["findings"]
    assert finding["witness"]["bytes_a"][:11] == "00 00 00 40"
    assert finding["witness"]["bytes_b"][:11] == "00 00 80 3f"
    assert finding["no_witness"] == ""


def test_no_witness_is_looked_for_unless_asked(run_warm, racy):
    (finding,) = json.loads(run_warm("sanitize", "--json", racy).stdout)["findings"]
    assert (finding["witness"], finding["no_witness"]) == (None, "")


def test_explore_joins_the_findings_of_all_schedules(run_warm, racy, tmp_path):
    (tmp_path / "cudatool").mkdir()  # as in a checkout, whose package is not the one that is installed
    (tmp_path / "cudatool" / "__init__.py").write_text("1 / 0")
    done = run_warm("sanitize", "--explore", 4, racy)
    assert done.returncode == 1, done.stderr
    assert "cudatool sanitize: 1 finding" in done.stdout
    assert "seen:    under fifo, lifo, late, random 1\n" in done.stdout
    assert "ran under: 4 schedules: fifo, lifo, late, random 1\n" in done.stdout
    assert "4 of 4 schedules done" in done.stderr


def test_explore_reports_output_that_depends_on_the_schedule(run_warm, racy):
    report = json.loads(run_warm("sanitize", "--explore", 2, "--json", racy).stdout)
    fifo, lifo = report["schedules"]
    assert (fifo["schedule"], fifo["difference"]) == ("fifo", "")
    assert lifo["difference"] == "line 1 of the output is 'now 1.0', under fifo 'now 2.0'"
    assert report["findings"][0]["seen_in"] == ["fifo", "lifo"]


def test_a_line_of_the_program_counts_however_it_begins(run_warm, tmp_path):
    (tmp_path / "racy.py").write_text(_RACY.replace('"now"', '"cudatool:"'))
    report = json.loads(run_warm("sanitize", "--explore", 2, "--json", "racy.py").stdout)
    differences = [schedule["difference"] for schedule in report["schedules"]]
    assert differences == ["", "line 1 of the output is 'cudatool: 1.0', under fifo 'cudatool: 2.0'"]


def test_program_that_fails_under_one_schedule_gives_status_3(run_warm, tmp_path):
    (tmp_path / "fails.py").write_text(_FAILS_LATE)
    done = run_warm("sanitize", "--explore", 2, "fails.py")
    assert done.returncode == 3
    assert "under lifo: the program failed with exit status 1" in done.stdout
    assert "race-raw" in done.stdout
    assert "the copy came first" in done.stderr
    assert 1 == done.stdout.count("what the workload would have done")


def test_output_that_differs_from_run_to_run_is_not_blamed_on_the_schedule(run_warm, tmp_path):
    (tmp_path / "clean.py").write_text(_CLEAN)
    done = run_warm("sanitize", "--explore", 2, "--allow-empty", "--json", "clean.py")
    assert done.returncode == 0
    assert [run["difference"] for run in json.loads(done.stdout)["schedules"]] == ["", ""]


def test_explore_proves_what_it_found_if_asked(run_warm, racy):
    report = json.loads(run_warm("sanitize", "--explore", 1, "--witness", "--json", racy).stdout)
    assert report["findings"][0]["witness"]["observed_at"] == "what cuMemcpyDtoHAsync (racy.py:10) copies to the host"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explore", "0", "racy.py"], "0 is not in the range"),
        (["--explore", "2", "missing.py"], "missing.py does not exist"),
        (["--device", "cuda", "--explore", "2", "racy.py"], "--explore needs the software device"),
        (["--device", "sim:memory=x", "--explore", "2", "racy.py"], "'x' is not a size"),
        (["--witness-budget", "0", "--witness", "racy.py"], "0.0 is not in the range"),
        (["--witness", "t.ctrace"], "--witness needs the program"),
        (["--explore", "2", "t.ctrace"], "--explore needs the program"),
        (["--explore", "2", "--html", "page.html", "racy.py"], "--html shows one run"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line_and_status_2(run_here, racy, tmp_path, arguments, message):
    with record(tmp_path / "t.ctrace"):
        pass
    done = run_here("sanitize", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [CudatoolError, KeyboardInterrupt])
def test_no_other_schedule_begins_after_one_that_failed(monkeypatch, racy, tmp_path, error):
    begun = []

    def run(schedule, device, job):
        begun.append(schedule)
        if len(begun) == 1:
            raise error("it failed")
        time.sleep(0.02)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_schedules, "_run", run)
    monkeypatch.setattr(_schedules, "processors", lambda: 1)
    with pytest.raises(error):
        _schedules.explored(Proof(budget_s=None, schedules=100), "sim", "race", (racy,), children=True)
    assert len(begun) < 100
