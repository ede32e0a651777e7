"""`cudatool schema COMMAND` describes what the command prints with --json, and all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cudatool.cli import _COMMANDS
from cudatool.cli._schemas import COMMANDS, schema_of_command

ROOT = Path(__file__).resolve().parents[2]
_SNAPSHOTS = sorted((ROOT / "tests" / "data").glob("*.pickle.xz"))
_PROGRAM = """
import cudatool as ct
kept = []
def hog(n=9 << 20):
    kept.append(ct.empty(n, "u1"))
for n in range(8):
    with ct.range(f"step {n}"):
        hog(1 << 20); x = ct.ones(1000, "f4"); y = ct.matmul(x.reshape(10, 100), x.reshape(100, 10)); y.get()
try:
    while True: hog()
except ct.OutOfMemoryError: pass
"""
_PTX = """
.version 8.0
.target sm_90
.address_size 64
.global .align 4 .u32 counter;
.visible .entry add(.param .u64 out, .param .u32 n)
{
    .reg .b64 %rd<3>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [n];
    atom.global.add.u32 %r2, [counter], 1;
    st.global.u32 [%rd1], %r1; ret;
}
"""


def _strict(schema: Any) -> Any:
    """Return a schema in which an object has no other fields than those that are described."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(one) for name, one in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict


def _validate(command: str, text: str) -> None:
    validator = jsonschema.Draft202012Validator(_strict(schema_of_command(command)))
    errors = [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(json.loads(text))]
    assert not errors, "\n".join(errors[:5])


@pytest.fixture
def trace(run_warm, tmp_path) -> str:
    (tmp_path / "job.py").write_text(_PROGRAM)
    done = run_warm("run", "--device", "sim:memory=256MiB", "-o", "job.ctrace", "job.py")
    assert done.returncode == 0, done.stderr
    return "job.ctrace"


@pytest.mark.parametrize("command", COMMANDS)
def test_command_prints_a_schema_that_is_one(command, run_here):
    done = run_here("schema", command)
    assert done.returncode == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(done.stdout))


@pytest.mark.parametrize(
    "command", sorted(set(COMMANDS) - {"devices", "diff", "fleet", "live", "ptx", "query", "sanitize"})
)
@pytest.mark.parametrize("path", _SNAPSHOTS, ids=lambda path: path.name)
def test_results_of_snapshots_are_valid(command, path, run_here):
    done = run_here(command, "--json", path)
    assert done.stdout, done.stderr
    _validate(command, done.stdout)


@pytest.mark.parametrize(
    "words",
    [
        ["snapshot", "--json"],
        ["leaks", "--json"],
        ["oom", "--json"],
        ["oom", "--json", "--budget", "0"],
        ["replay", "--json"],
        ["replay", "--json", "--check"],
        ["replay", "--json", "--conf", "expandable_segments:True"],
    ],
    ids=" ".join,
)
def test_results_of_a_recording_are_valid(words, trace, run_here):
    done = run_here(*words, trace)
    assert done.stdout, done.stderr
    _validate(words[0], done.stdout)


def test_results_of_several_processes_are_valid(run_warm, run_here, tmp_path):
    child = "import cudatool as ct; ct.zeros(1000).get()"
    program = f"import subprocess, sys\n{child}\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)"
    (tmp_path / "job.py").write_text(program)
    assert run_warm("run", "-o", "job.ctrace", "job.py").returncode == 0
    for command in ("snapshot", "leaks"):
        text = run_here(command, "--json", "job.ctrace").stdout
        assert len(json.loads(text)["processes"]) == 1
        _validate(command, text)


def test_pinned_memory_is_in_the_text_and_the_valid_result(run_warm, run_here, tmp_path):
    program = "import cudatool as ct\ndef load(): return ct.empty_pinned(1 << 20)\nkept = load(), load(), load()\n"
    (tmp_path / "job.py").write_text(program + "del kept\nagain = load()\n")
    assert run_warm("run", "-o", "job.ctrace", "job.py").returncode == 0
    text = run_here("snapshot", "--json", "job.ctrace").stdout
    _validate("snapshot", text)
    (site,) = json.loads(text)["pinned_holders"]["sites"]
    assert ("blocks", "job.py:2 (load)", 3 * (4 << 20)) == (site["holder"], site["label"], site["size"])
    table = run_here("snapshot", "job.ctrace").stdout.partition("Pinned host memory at its peak\n")[2]
    head, row, line = table.splitlines()[:3]
    assert ["Library", "Call", "site", "What", "Pieces", "Bytes"] == head.split()
    assert "cudatool's runtime job.py:2 (load) blocks in use 3 12 MiB" == " ".join(row.split())
    assert "12 MiB together; 12 MiB at the end" == line.strip()


def test_result_of_diff_is_valid(trace, run_here):
    for words in ((trace, trace), (_SNAPSHOTS[0], _SNAPSHOTS[1])):
        _validate("diff", run_here("diff", "--json", *words).stdout)


def test_results_of_query_and_fleet_are_valid(run_here, tmp_path):
    pytest.importorskip("duckdb", reason="needs DuckDB (cudatool[fleet])")
    assert run_here("export", _SNAPSHOTS[0], "--to", "parquet", "-o", "data").returncode == 0
    question = "SELECT run, rank, peak_active, 1.5, 2.5::DECIMAL(4, 1), true, [1, 2] FROM ranks"
    done = run_here("fleet", "--json", "data", "--against", "data")
    assert done.returncode == 4
    _validate("fleet", done.stdout)
    _validate("query", run_here("query", "--json", "data", question).stdout)


def test_result_of_devices_is_valid(run_warm):
    _validate("devices", run_warm("devices", "--device", "sim:count=2", "--json").stdout)


def test_result_of_ptx_is_valid(run_here, tmp_path):
    (tmp_path / "add.ptx").write_text(_PTX)
    done = run_here("ptx", "--json", "add.ptx")
    assert done.returncode == 0, done.stderr
    _validate("ptx", done.stdout)


def test_result_of_sanitize_is_valid(run_warm, tmp_path):
    (tmp_path / "job.py").write_text("import cudatool as ct\nct.zeros(10).get()")
    done = run_warm("sanitize", "--device", "sim", "--format", "json", "job.py")
    jsonschema.Draft202012Validator(schema_of_command("sanitize")).validate(json.loads(done.stdout))


def test_rmm_log_without_reserved_memory_is_valid(run_here, tmp_path):
    lines = ["Thread,Time,Action,Pointer,Size,Stream", "1,10:00:00:000001,allocate,0x7f0000000000,1024,0x0"]
    (tmp_path / "rmm.csv").write_text("\n".join(lines) + "\n")
    done = run_here("snapshot", "--json", "rmm.csv")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"][0]["peak_reserved"] is None
    _validate("snapshot", done.stdout)


def test_every_command_with_json_has_a_schema():
    import importlib

    with_json = {
        name
        for name in _COMMANDS
        for option in getattr(importlib.import_module(f"cudatool.cli.{name}"), name).params
        if "--json" in option.opts or ("--format" in option.opts and name == "sanitize")
    }
    assert with_json == set(COMMANDS)


def test_command_without_json_is_refused(run_here):
    done = run_here("schema", "snapshut")
    assert done.returncode == 2
    assert "did you mean 'snapshot'?" in done.stderr


def test_validation_here_notices_a_field_that_no_schema_has(run_here):
    data = json.loads(run_here("snapshot", "--json", _SNAPSHOTS[0]).stdout)
    data["devices"][0]["diagnosis"]["leaks"]["steps"]["more"] = 1
    with pytest.raises(AssertionError, match="more"):
        _validate("snapshot", json.dumps(data))
