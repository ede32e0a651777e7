"""`cudatool sanitize`: exit statuses, formats, and what it does with bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from warm_process import COMMAND_LINE, run_python

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


def test_findings_give_status_1_and_a_report_alone_on_stdout(run_warm, racy):
    done = run_warm("sanitize", racy)
    assert done.returncode == 1
    assert "race-waw" in done.stdout
    assert "racy.py:7" in done.stdout
    assert "racy.py:8" in done.stdout
    assert "output of the program" not in done.stdout
    assert "output of the program" in done.stderr


def test_error_exitcode_replaces_status_1(run_warm, racy):
    assert run_warm("sanitize", "--error-exitcode", "42", racy).returncode == 42
    assert run_warm("sanitize", "--error-exitcode", "0", racy).returncode == 0


def test_json_names_its_schema(run_warm, racy):
    report = json.loads(run_warm("sanitize", "--json", racy).stdout)
    assert report["schema"] == "cudatool.sanitize/1"
    assert len(report["findings"]) == 1


def test_recorded_trace_can_be_checked_later(run_warm, racy):
    assert run_warm("run", "-o", "t.ctrace", racy).returncode == 0
    done = run_warm("sanitize", "t.ctrace")
    assert done.returncode == 1
    assert "race-waw" in done.stdout


def test_what_follows_a_trace_is_refused_and_said_where_options_stand(run_here, run_warm, tmp_path):
    assert 0 == run_warm("run", "-o", "t.ctrace", "-c", "pass").returncode
    done = run_here("sanitize", "t.ctrace", "--format", "json")
    message = "t.ctrace is a trace, which takes no arguments; options stand before it"
    assert (2, f"cudatool: error: {message}\n") == (done.returncode, done.stderr)


def test_workload_that_fails_gives_status_3_and_still_a_report(run_warm, racy, tmp_path):
    (tmp_path / "fails.py").write_text(_RACY + "raise SystemExit(9)\n")
    done = run_warm("sanitize", "fails.py")
    assert done.returncode == 3
    assert "race-waw" in done.stdout
    assert "exit status 9" in done.stderr


def test_finalizer_of_the_workload_does_not_change_the_status(run_command, racy, tmp_path):
    ends = "class Ends:\n    def __del__(self, end=__import__('os')._exit): end(0)\nimport builtins\nbuiltins.kept = Ends()\n"
    (tmp_path / "a.py").write_text(f"import runpy\nrunpy.run_path({racy!r})\n{ends}")
    assert 1 == run_command("sanitize", "a.py").returncode


def test_clean_program_gives_status_0(run_warm, tmp_path):
    (tmp_path / "clean.py").write_text(_RACY.replace('buffer.fill(b"b"', 'two.wait(one)\nbuffer.fill(b"b"'))
    done = run_warm("sanitize", "clean.py")
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
def test_bad_input_is_one_clear_line_and_status_2(run_here, tmp_path, arguments, message):
    (tmp_path / "foreign.ctrace").write_bytes(b"GIF89a nothing of ours")
    done = run_here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "yaml"], "there is no format 'yaml'"),
        (["--format", "json", "--format", "sarif"], "only one of json and sarif can go to stdout"),
        (["--format", "sarif=nowhere/f.sarif"], "cannot write"),
        (["--format", "json=."], "it is a directory"),
        (["--html", "nowhere/page.html"], "cannot write"),
        (["--suppress", "race"], "'race' is not a term of a rule"),
        (["--suppress", "@rules.txt"], "cannot read suppressions from rules.txt: No such file or directory"),
        (["--baseline", "none.json"], "none.json: there is no such baseline"),
        (["--baseline", "bad.json"], "bad.json: is not JSON"),
        (["--update-baseline"], "--update-baseline needs --baseline FILE"),
        (["--baseline", "nowhere/b.json", "--update-baseline"], "its directory does not exist"),
        (["--checks", ","], "name at least one check"),
    ],
)
def test_what_is_wrong_with_the_options_is_said_in_a_line_before_the_workload_runs(
    run_here, tmp_path, options, message
):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "marks.py").write_text("open('ran', 'w')")
    done = run_here("sanitize", *options, "marks.py")
    assert (2, "") == (done.returncode, done.stdout)
    assert message in done.stderr
    assert 1 == done.stderr.count("\n")
    assert not (tmp_path / "ran").exists()


def test_several_formats_at_once(run_warm, racy, tmp_path):
    files = {"sarif": "f.sarif", "junit": "j.xml", "json": "f.json", "gitlab": "g.json", "github": "log.txt"}
    options = [f"--format={form}={file}" for form, file in files.items()]
    done = run_warm("sanitize", *options, "--html", "page.html", racy)
    assert 1 == done.returncode, done.stderr
    assert "cudatool sanitize: 1 finding" == done.stdout.splitlines()[-1]
    assert [f"Wrote {file}" for file in [*files.values(), "page.html"]] == done.stderr.splitlines()[-6:]
    report = json.loads((tmp_path / "f.json").read_text())
    (finding,) = report["findings"]
    assert (["race", "memcheck", "synccheck"], 0) == (report["checks"], report["workload_status"])
    for file in files.values():
        assert finding["fingerprint"] in (tmp_path / file).read_text()
    assert (tmp_path / "page.html").stat().st_size


def test_text_and_annotations_share_stdout_and_the_job_gets_its_page(racy, tmp_path):
    (tmp_path / "summary.md").write_text("### of an earlier step\n")
    environment = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "CUDATOOL_DEVICE": "sim"}
    words = ["sanitize", "--format", "text", "--format", "github", racy]
    done = run_python(COMMAND_LINE, *words, folder=tmp_path, environment=environment)
    assert 1 == done.returncode, done.stderr
    assert done.stdout.startswith("1. race: two writes in no order [race-waw]")
    assert "::error file=racy.py,line=8,title=race%3A two writes in no order [race-waw]::" in done.stdout
    page = (tmp_path / "summary.md").read_text()
    assert page.startswith("### of an earlier step\n### cudatool sanitize: 1 finding\n")
    assert "| error | race-waw | racy.py:8 |" in page


def test_names_that_stdout_cannot_show_are_escaped(racy, tmp_path):
    (tmp_path / racy).rename(tmp_path / "gr\u00f6\u00dfe.py")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "CUDATOOL_DEVICE": "sim"}
    command = [sys.executable, "-m", "cudatool", "sanitize", "gr\u00f6\u00dfe.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert 1 == done.returncode, done.stderr
    assert "gr\\xf6\\xdfe.py:8 in <module>" in done.stdout


def test_a_workload_that_fails_is_in_the_files_too(run_warm, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(9)\n")
    done = run_warm("sanitize", "--format=junit=j.xml", "--format=sarif=f.sarif", "fails.py")
    assert 3 == done.returncode
    assert "failed with exit status 9" in (tmp_path / "j.xml").read_text()
    (run,) = json.loads((tmp_path / "f.sarif").read_text())["runs"]
    assert run["invocations"][0]["executionSuccessful"] is False


def test_a_baseline_from_its_writing_to_its_end(run_warm, racy, tmp_path):
    path = tmp_path / "known.json"
    options = ["sanitize", "--baseline", "known.json"]

    def entries():
        return json.loads(path.read_text())["findings"]

    def change(**fields):
        data = json.loads(path.read_text())
        data["findings"][0] |= fields
        path.write_text(json.dumps(data))

    assert 0 == run_warm(*options, "--update-baseline", racy).returncode
    (entry,) = entries()
    assert ("race-waw", "race", "", "") == (entry["kind"], entry["check"], entry["reason"], entry["expires"])
    assert "cuMemsetD8Async in <module> (racy.py); cuMemsetD8Async in <module> (racy.py)" == entry["what"]
    change(reason="both are tests", expires="2999-12-31")

    (tmp_path / racy).write_text("# moved\n" + _RACY)
    done = run_warm(*options, racy)
    assert (0, "cudatool sanitize: no findings, 1 known") == (done.returncode, done.stdout.splitlines()[-1])
    assert "both are tests" in done.stdout

    change(expires="2020-01-31")
    done = run_warm(*options, racy)
    assert 1 == done.returncode
    assert "The baseline knows it (both are tests), but only until 2020-01-31." in " ".join(done.stdout.split())
    assert 1 == run_warm(*options, "--update-baseline", racy).returncode  # a day is moved by hand
    assert ("both are tests", "2020-01-31") == (entries()[0]["reason"], entries()[0]["expires"])

    (tmp_path / "clean.py").write_text("import numpy as np, cudatool as ct\nct.asarray(np.zeros(4)).get()\n")
    done = run_warm(*options, "clean.py")
    last = "cudatool sanitize: no findings, 1 stale in the baseline"
    assert (0, last) == (done.returncode, done.stdout.splitlines()[-1])
    (tmp_path / "fails.py").write_text("raise SystemExit(9)")
    assert 3 == run_warm(*options, "--update-baseline", "fails.py").returncode
    assert 1 == len(entries())  # half a run says nothing of what is gone
    assert 0 == run_warm(*options, "--update-baseline", "clean.py").returncode
    assert [] == entries()


def test_rules_and_comments_set_findings_aside(run_warm, racy, tmp_path):
    done = run_warm("sanitize", "--suppress", "kind=race-waw file=racy.py", racy)
    assert (0, "cudatool sanitize: no findings, 1 suppressed") == (done.returncode, done.stdout.splitlines()[-1])
    assert 1 == run_warm("sanitize", "--suppress", "kind=race-raw", racy).returncode
    (tmp_path / racy).write_text(_RACY.replace("stream=two)", "stream=two)  # cudatool: ignore[race]"))
    done = run_warm("sanitize", racy)
    last = "cudatool sanitize: no findings, 1 ignored by comments"
    assert (0, last) == (done.returncode, done.stdout.splitlines()[-1])
    (tmp_path / racy).write_text(_RACY.replace("stream=two)", "stream=two)  # cudatool: ignore[rces]"))
    done = run_warm("sanitize", racy)
    assert 1 == done.returncode
    assert "racy.py:8: ignore[rces]" in done.stdout


_DEFECTS = """
import numpy as np
import cudatool as ct

SOURCE = '''
extern "C" __global__ void beyond(int *a, int n) { a[threadIdx.x + n] = 1; }
extern "C" __global__ void race(int *a) { a[0] = threadIdx.x; a[1] = a[0]; }
'''

def work():
    beyond, race = ct.compile(SOURCE, "beyond"), ct.compile(SOURCE, "race")
    one, two = ct.Stream(), ct.Stream()
    for _ in [0]:
        a = ct.zeros(64, np.int32)
        ct.synchronize()
        with ct.stream(one):
            beyond[(1, 64)](a, 32)
        with ct.stream(two):
            beyond[(1, 32)](a, 40)
            race[(1, 64)](a)
    ct.synchronize()
    return ct.empty(1 << 20, np.int8)

kept = [work() for _ in range(2)]
"""


def test_fingerprints_are_the_same_on_moved_lines_elsewhere_and_under_any_schedule(run_warm, tmp_path):
    def found(path, device="sim"):
        done = run_warm("sanitize", "--checks", "all", "--json", "--device", device, path)
        assert 1 == done.returncode, done.stderr
        report = json.loads(done.stdout)
        lists = (report["findings"], report["possible"], report["on_device"])
        return sorted((one["kind"], one["fingerprint"]) for some in lists for one in some)

    (tmp_path / "defects.py").write_text(_DEFECTS)
    expected = found(tmp_path / "defects.py")
    assert {"race-waw", "out-of-bounds", "kernel-race"} <= {kind for kind, _ in expected}
    for schedule in ("lifo", "late", "random,seed=5,threads=2"):
        assert expected == found(tmp_path / "defects.py", f"sim:schedule={schedule}")
    (tmp_path / "elsewhere").mkdir()
    moved = _DEFECTS.replace("SOURCE = '''", "# moved\n" * 9 + "SOURCE = '''\n\n\n").replace("    one,", "\n    one,")
    (tmp_path / "elsewhere" / "defects.py").write_text(moved)
    assert expected == found(tmp_path / "elsewhere" / "defects.py")


def test_a_program_is_not_taken_for_the_page_to_write(run_warm, tmp_path):
    (tmp_path / "train.py").write_text("print('precious')")
    done = run_warm("sanitize", "--html", "train.py", "train.py")
    assert (2, "") == (done.returncode, done.stdout)
    assert "train.py is a program: --html findings.html train.py" in done.stderr
    assert "precious" in (tmp_path / "train.py").read_text()
