"""`cudatool sanitize` of programs that it cannot see, or not to their end: never a clean verdict."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

WORK = """
import numpy as np, cudatool as ct
a = ct.asarray(np.arange(100, dtype=np.float32))
a.get()
"""
CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {WORK!r}], check=True)
"""


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("pass", "nothing was checked"),
        (CHILD, "nothing was checked; not checked: 1 child process (python -c)"),
        ("import os; os.execvp('true', ['true'])", "nothing was checked; not checked: what ran after exec (true)"),
        ("import os; os._exit(0)", "nothing was checked"),
    ],
)
def test_program_that_does_nothing_on_the_device_itself_was_not_checked(run_warm, tmp_path, program, verdict):
    (tmp_path / "a.py").write_text(program)
    done = run_warm("sanitize", "--no-children", "--format", "text", "--format", "json=a.json", "a.py")
    assert (done.returncode, last_line(done)) == (2, f"cudatool sanitize: {verdict}"), done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["outcome"] == "not-checked"


def test_library_of_a_child_process_is_the_reason_that_nothing_was_checked(run_warm, tmp_path):
    (tmp_path / "jax.py").write_text("")  # what matters is its name
    (tmp_path / "a.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import jax'])\n")
    done = run_warm("sanitize", "a.py")
    assert (done.returncode, last_line(done)) == (2, "cudatool sanitize: nothing was checked"), done.stderr
    assert "JAX is recorded on a GPU only." in " ".join(done.stdout.split())


@pytest.mark.parametrize("option", [("--explore", "2"), ("--witness",)])
def test_empty_program_was_not_checked_however_it_is_searched(run_warm, tmp_path, option):
    (tmp_path / "a.py").write_text("")
    done = run_warm("sanitize", *option, "a.py")
    assert (done.returncode, last_line(done)) == (2, "cudatool sanitize: nothing was checked"), done.stderr


def test_work_in_processes_of_multiprocessing_is_named_where_they_are_not_recorded(run_warm, tmp_path):
    program = f"""
import multiprocessing
def work(): exec({WORK!r})
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start(); child.join()
    assert not child.exitcode
"""
    (tmp_path / "a.py").write_text(program)
    done = run_warm("sanitize", "--no-children", "a.py")
    verdict = "cudatool sanitize: nothing was checked; not checked: 1 child process (multiprocessing)"
    assert (done.returncode, last_line(done)) == (2, verdict), done.stderr


def test_pytorch_on_the_cpu_was_not_checked_and_the_report_says_why(run_warm, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    (tmp_path / "a.py").write_text("import torch\nassert torch.ones(3).sum() == 3")
    done = run_warm("sanitize", "a.py")
    assert (done.returncode, last_line(done)) == (2, "cudatool sanitize: nothing was checked"), done.stderr
    assert "PyTorch is recorded on a GPU only" in " ".join(done.stdout.split())


def test_trace_recorded_without_accesses_was_not_checked(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(WORK)
    assert run_warm("run", "-o", "a.ctrace", "a.py").returncode == 0
    done = run_warm("sanitize", "a.ctrace")
    verdict = "cudatool sanitize: nothing was checked; not checked: 2 operations, memcheck, synccheck"
    assert (done.returncode, " ".join(done.stdout.split()).endswith(verdict)) == (2, True), done.stdout


def test_allow_empty_accepts_a_program_that_does_nothing_on_the_device(run_warm, tmp_path):
    (tmp_path / "a.py").write_text("pass")
    done = run_warm("sanitize", "--allow-empty", "a.py")
    assert (done.returncode, last_line(done)) == (0, "cudatool sanitize: nothing was checked")


def test_part_that_was_not_checked_is_named_and_strict_fails_for_it(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(WORK + CHILD)
    verdict = "cudatool sanitize: no findings in what was checked; not checked: 1 child process (python -c)"
    for options, status in (((), 0), (("--strict",), 2)):
        done = run_warm("sanitize", "--no-children", *options, "a.py")
        text = " ".join(done.stdout.split())
        assert (done.returncode, text.endswith(verdict)) == (status, True), done.stdout


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("os._exit(0)", 0, ""),
        ("os._exit(5)", 3, "failed with exit status 5"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 3, "was ended by SIGKILL"),
        ("os.abort()", 3, "was ended by SIGABRT"),
    ],
)
def test_program_that_leaves_abruptly_is_reported_up_to_there(run_warm, tmp_path, end, status, said):
    (tmp_path / "a.py").write_text(f"import os, signal\n{WORK}\n{end}")
    done = run_warm("sanitize", "--json", "a.py")
    report = json.loads(done.stdout)
    outcome = "partly-checked" if said else "clean"
    assert (done.returncode, report["operations"], report["outcome"]) == (status, 2, outcome), done.stderr
    assert [["workload", [said]]] * bool(said) == [[gap["kind"], gap["names"]] for gap in report["gaps"]]
    assert said in done.stderr
    assert bool(report["workload_status"]) == bool(said)


def test_race_before_the_program_leaves_abruptly_is_found(run_warm, tmp_path):
    racy = """
import os, numpy as np, cudatool as ct
a = ct.zeros(1000, np.float32)
one, two = ct.Stream(), ct.Stream()
ct.synchronize()
with ct.stream(one): a += 1
with ct.stream(two): a += 1
ct.synchronize()
os._exit(0)
"""
    (tmp_path / "a.py").write_text(racy)
    done = run_warm("sanitize", "a.py")
    assert (done.returncode, "race-" in done.stdout) == (1, True), done.stdout + done.stderr


def test_forked_child_of_the_program_reports_nothing_and_the_program_does(run_warm, tmp_path):
    (tmp_path / "a.py").write_text("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n")
    done = run_warm("sanitize", "--no-children", "a.py")
    assert done.stdout.count("cudatool sanitize: nothing was checked") == 1
    assert "1 child process (os.fork)" in done.stdout


def test_recording_that_the_file_system_has_no_room_for_is_no_clean_report(run_warm, tmp_path):
    program = """
import resource, numpy as np, cudatool as ct
a = ct.asarray(np.arange(100, dtype=np.float32))
resource.setrlimit(resource.RLIMIT_FSIZE, (350_000, resource.RLIM_INFINITY))
for _ in range(6000):
    a.get()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
    (tmp_path / "a.py").write_text(program)
    done = run_warm("sanitize", "a.py")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cudatool sanitize: no findings in an incomplete recording" in done.stdout


def test_recording_that_cannot_be_finished_is_no_clean_report(run_warm, tmp_path):
    program = """
import resource, numpy as np, cudatool as ct
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
ct.asarray(np.arange(100, dtype=np.float32)).get()
"""
    (tmp_path / "a.py").write_text(program)
    done = run_warm("sanitize", "a.py")
    assert done.returncode == 2, done.stdout + done.stderr


def test_baseline_is_not_emptied_by_a_run_that_checked_nothing(run_warm, tmp_path):
    known = {"schema": "cudatool.baseline/1", "findings": []}
    (tmp_path / "a.py").write_text("pass")
    (tmp_path / "b.json").write_text(json.dumps(known) + "\n")
    before = (tmp_path / "b.json").read_text()
    run_warm("sanitize", "--baseline", "b.json", "--update-baseline", "a.py")
    assert (tmp_path / "b.json").read_text() == before


def test_signals_reach_the_workload_and_ctrl_c_only_once(tmp_path):
    program = """
import signal, time, sys
count = 0
def handler(number, frame):
    global count
    count += 1
    print("got", number, count, file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, handler)
signal.signal(signal.SIGINT, handler)
print("ready", file=sys.stderr, flush=True)
end = time.monotonic() + 30
while count < 2 and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(0.3)
"""
    (tmp_path / "a.py").write_text(program)
    command = [sys.executable, "-c", "from cudatool.cli import main; main()", "sanitize", "--allow-empty", "a.py"]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "ready" not in (line := process.stderr.readline()):
            assert line, "the program ended before it began"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "got 15 1\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "got 2 2\n"
        assert process.wait(60) == 0


def test_workload_does_not_outlive_a_killed_command(tmp_path):
    (tmp_path / "a.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    command = [sys.executable, "-c", "from cudatool.cli import main; main()", "sanitize", "a.py"]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).strip().isdigit():
            assert line, "the program ended before it began"
        process.kill()
    for _ in range(1000):
        try:
            os.kill(int(line), 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{int(line)}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.05)
    raise AssertionError("the workload still runs")


def test_internal_error_has_a_status_of_its_own_and_one_line(run_warm, tmp_path):
    broken = "import cudatool.cli.devices as d; d.devices.callback = lambda **options: [][1]; "
    for environment, traces in (({}, 0), ({"CUDATOOL_DEBUG": "1"}, 1)):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{broken}import sys; sys.argv[1:] = ['devices']; from cudatool.cli import main; main()",
            ],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (70, "")
        assert done.stderr.count("Traceback") == traces
        assert done.stderr.splitlines()[-1].startswith(
            "cudatool: internal error: IndexError: list index out of range ("
        )
        assert "report it" in done.stderr


def test_set_up_that_fails_is_one_error_of_the_command(run_warm, tmp_path):
    (tmp_path / "a.py").write_text("pass")
    done = run_warm("sanitize", "--device", "sim:memory=1GiB,count=99", "a.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("cudatool: error:") == 1


RACY = """
import numpy as np, cudatool as ct
a = ct.zeros(1000, np.float32)
one, two = ct.Stream(), ct.Stream()
ct.synchronize()
with ct.stream(one):
    a += 1
with ct.stream(two):
    a += 1
"""


def test_trace_has_the_race_of_its_program_if_accesses_were_recorded_and_else_was_not_checked(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(RACY)
    for options, status, said in ((["--accesses"], 1, "race-"), ([], 2, "nothing was checked")):
        run_warm("run", "-f", "-o", "a.ctrace", *options, "a.py")
        done = run_warm("sanitize", "--checks", "race", "a.ctrace")
        assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raise SystemExit(7)", "it failed with exit status 7"),
        ("import os; os.kill(os.getpid(), 9)", "it ended at once, by a signal or os._exit"),
    ],
)
def test_trace_of_a_program_that_failed_says_so_in_the_verdict(run_warm, tmp_path, ending, said):
    (tmp_path / "a.py").write_text(f"import cudatool as ct\nct.ones(10).get()\n{ending}")
    run_warm("run", "--accesses", "-o", "a.ctrace", "a.py")
    done = run_warm("sanitize", "--checks", "race", "a.ctrace")
    verdict = f"no findings in what was checked; not checked: what the workload would have done: {said}"
    assert (0, True) == (done.returncode, verdict in " ".join(done.stdout.split()))
    strict = run_warm("sanitize", "--checks", "race", "--strict", "--json", "a.ctrace")
    assert (2, "partly-checked") == (strict.returncode, json.loads(strict.stdout)["outcome"])


def test_children_use_the_device_that_the_command_was_given(run_warm, tmp_path):
    child = "import cudatool as ct; print('child:', ct.mem_get_info(0)[1] >> 30)"
    (tmp_path / "a.py").write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")
    for command in (["run", "-o", "a.ctrace"], ["sanitize", "--allow-empty"]):
        done = run_warm(*command, "--device", "sim:memory=3GiB", "a.py")
        assert "child: 3" in done.stdout + done.stderr, done.stderr
