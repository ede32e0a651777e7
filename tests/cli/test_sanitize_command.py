"""`cudatool sanitize`: exit statuses, formats, and what it does with bad input."""

from __future__ import annotations

import json

import pytest

_RACY = """
from cuda.core import Device
device = Device(); device.set_current()
one, two = device.create_stream(), device.create_stream()
buffer = device.memory_resource.allocate(4096, stream=one)
device.sync()
buffer.fill(b"a", stream=one)
buffer.fill(b"b", stream=two)
device.sync()
print("output of the program")
"""


@pytest.fixture
def racy(tmp_path):
    (tmp_path / "racy.py").write_text(_RACY)
    return "racy.py"


def test_findings_give_status_1_and_a_report_alone_on_stdout(run_command, racy):
    done = run_command("sanitize", racy)
    assert done.returncode == 1
    assert "race-waw" in done.stdout
    assert "racy.py:7" in done.stdout
    assert "racy.py:8" in done.stdout
    assert "output of the program" not in done.stdout
    assert "output of the program" in done.stderr


def test_error_exitcode_replaces_status_1(run_command, racy):
    assert run_command("sanitize", "--error-exitcode", "42", racy).returncode == 42
    assert run_command("sanitize", "--error-exitcode", "0", racy).returncode == 0


def test_json_names_its_schema(run_command, racy):
    report = json.loads(run_command("sanitize", "--json", racy).stdout)
    assert report["schema"] == "cudatool.sanitize/1"
    assert len(report["findings"]) == 1


def test_recorded_trace_can_be_checked_later(run_command, racy):
    assert run_command("run", "-o", "t.ctrace", racy).returncode == 0
    done = run_command("sanitize", "t.ctrace")
    assert done.returncode == 1
    assert "race-waw" in done.stdout


def test_workload_that_fails_gives_status_3_and_still_a_report(run_command, racy, tmp_path):
    (tmp_path / "fails.py").write_text(_RACY + "raise SystemExit(9)\n")
    done = run_command("sanitize", "fails.py")
    assert done.returncode == 3
    assert "race-waw" in done.stdout
    assert "exit status 9" in done.stderr


def test_clean_program_gives_status_0(run_command, tmp_path):
    (tmp_path / "clean.py").write_text(_RACY.replace('buffer.fill(b"b"', 'two.wait(one)\nbuffer.fill(b"b"'))
    done = run_command("sanitize", "clean.py")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sanitize"], "name a Python program"),
        (["sanitize", "missing.py"], "missing.py does not exist"),
        (["sanitize", "missing.ctrace"], "missing.ctrace"),
        (["sanitize", "foreign.ctrace"], "foreign.ctrace"),
        (["sanitize", "--format", "yaml", "x.py"], "yaml"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(run_command, tmp_path, arguments, message):
    (tmp_path / "foreign.ctrace").write_bytes(b"GIF89a nothing of ours")
    done = run_command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
