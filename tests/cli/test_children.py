"""The processes that a program starts: a trace for each that uses a device, found together with the program's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool.trace.events import Kind, WarningFlag
from cudatool.trace.family import children_of
from cudatool.trace.model import Ending
from cudatool.trace.reader import newest_trace, read

WORK = "import cudatool as ct; ct.zeros(1000).get()"
_UNTIL_TOLD = """
import os, time
print(flush=True)
for _ in range(600):
    if os.path.exists("end"): break
    time.sleep(0.1)
"""
PROGRAM = f"""
import multiprocessing, os, signal, subprocess, sys
from concurrent.futures import ProcessPoolExecutor

WORK = {WORK!r}

def work(way):
    exec(WORK)
    print(way, os.getpid(), flush=True)

def shown(way):
    return f"{{WORK}}; import os; print({{way!r}}, os.getpid(), flush=True)"

if __name__ == "__main__":
    python = sys.executable
    subprocess.run([python, "-c", shown("subprocess")], check=True, env={{**os.environ, "RANK": "3"}})
    subprocess.run([python, "-I", "-c", shown("isolated")], check=True)
    subprocess.run([python, "-c", f"import os; {{WORK}}; os.kill(os.getpid(), 9)"])
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {{shown('grandchild')!r}}], check=True)"
    subprocess.run([python, "-c", nested], check=True)
    subprocess.run([python, "-c", "import numpy"], check=True)
    replaced = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    subprocess.run([python, "-c", replaced, shown("exec")], check=True)
    for way in ("spawn", "fork", "forkserver"):
        child = multiprocessing.get_context(way).Process(target=work, args=(way,))
        child.start(); child.join()
        assert child.exitcode == 0
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(work, "pool").result()
    if not os.fork():
        work("os.fork")
        os._exit(0)
    os.wait()
"""
WAYS = {"subprocess", "isolated", "grandchild", "exec", "spawn", "fork", "forkserver", "pool", "os.fork"}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int], str]:
    """The program's own trace, the process ids that it printed, and what cudatool said."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("family")
    (folder / "a.py").write_text(PROGRAM)
    command = [sys.executable, "-c", "from cudatool.cli import main; main()", "run", "-o", "a.ctrace", "a.py"]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim", "COLUMNS": "80"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    printed = {way: int(process) for way, process in (line.split() for line in done.stdout.splitlines())}
    return folder / "a.ctrace", printed, done.stderr


def test_each_process_that_used_the_device_has_a_trace_however_it_was_started(family):
    path, printed, said = family
    assert WAYS == printed.keys()
    children = {trace.header["pid"]: trace for trace in children_of(read(path))}
    (killed,) = children.keys() - printed.values()
    assert set(printed.values()) == children.keys() - {killed}
    for process, trace in children.items():
        assert len(trace.of_kind(Kind.MEMCPY)) == 1, trace.source
        assert (Ending.KILLED if process == killed else Ending.CLOSED) == trace.ending
        assert f"Wrote {Path(trace.source).name} (process {process}" in " ".join(said.split())
    ranked = children[printed["subprocess"]]
    assert (f"a.rank3.{printed['subprocess']}.ctrace", "3") == (Path(ranked.source).name, ranked.header["rank"])
    assert len(children) + 1 == len(list(path.parent.glob("*.ctrace")))


def test_the_programs_trace_lists_its_processes_and_no_event_of_theirs(family):
    path, printed, _ = family
    trace = read(path)
    assert set(trace.records["kind"].tolist()) == {Kind.CHILD_PROCESS, Kind.CHILD_RECORDED}
    listed = {int(row["aux0"]): trace.names[int(row["name"])] for row in trace.of_kind(Kind.CHILD_RECORDED)}
    started = {int(row["aux0"]) for row in trace.of_kind(Kind.CHILD_PROCESS)}
    assert printed.items() <= {way: process for way, process in printed.items() if process in started}.items()
    for child in children_of(trace):
        assert Path(child.source).name == listed[child.header["pid"]]


def test_commands_find_the_traces_together(family, run_here, tmp_path):
    path, printed, _ = family
    assert newest_trace(path.parent) == path
    own = f"a.{printed['spawn']}"
    text = run_here("snapshot", path).stdout
    assert all(f"process {process}" in text for process in printed.values())
    document = json.loads(run_here("snapshot", "--json", path).stdout)
    assert len(document["processes"]) == len(WAYS) + 1
    page = run_here("snapshot", path, "--html", tmp_path / "a.html")
    assert page.returncode == 0 and (tmp_path / f"{own}.html").exists(), page.stderr
    leaks = json.loads(run_here("leaks", "--json", path).stdout)
    assert {one["source"] for one in leaks["processes"]} == {child.source for child in children_of(read(path))}
    for ending in (".json", ".perfetto.json"):
        done = run_here("export", path, "--to", "perfetto", "-o", tmp_path / f"a{ending}")
        assert done.returncode == 0 and (tmp_path / f"{own}{ending}").exists(), done.stderr


LEAKY = """
import multiprocessing, subprocess, sys
import cudatool as ct
from cuda.bindings import driver

x = ct.zeros(1000)

def work(leaks):
    if leaks:
        driver.cuMemAlloc(1 << 20)

if __name__ == "__main__":
    way, leaks = sys.argv[1:]
    if way == "spawn":
        child = multiprocessing.get_context("spawn").Process(target=work, args=(leaks == "leaks",))
        child.start(), child.join()
    elif way == "subprocess":
        subprocess.run([sys.executable, __file__, "here", leaks], check=True)
    else:
        work(leaks == "leaks")
"""


@pytest.mark.parametrize("way", ["spawn", "subprocess"])
def test_a_childs_own_variables_are_no_leak(run_warm, tmp_path, way):
    (tmp_path / "a.py").write_text(LEAKY)
    for leaks, found in (("not", []), ("leaks", [1 << 20])):
        done = run_warm("sanitize", "--checks", "leak", "--json", "a.py", way, leaks)
        report = json.loads(done.stdout)
        assert found == [one["size"] for one in report["on_device"]], done.stdout
        assert {"clean", "findings" if found else "clean"} == {one["outcome"] for one in report["processes"]}


HOLDING = f"""
import os, signal, subprocess, sys
code = {WORK!r} + "; import os, signal; from cuda.bindings import driver; driver.cuMemAlloc(1 << 20); "
if __name__ == "__main__":
    {WORK}
    subprocess.run([sys.executable, "-c", code + sys.argv[1]])
"""


def test_what_a_process_holds_at_its_own_end_is_a_leak(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(HOLDING)
    done = run_warm("sanitize", "--checks", "race,leak", "--json", "a.py", "pass")
    assert (1, [1 << 20]) == (done.returncode, [one["size"] for one in json.loads(done.stdout)["on_device"]])


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGTERM)", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"]
)
def test_what_a_process_held_when_it_was_ended_at_once_is_no_leak_and_not_clean(run_warm, tmp_path, end):
    (tmp_path / "a.py").write_text(HOLDING)
    done = run_warm("sanitize", "--checks", "race,leak", "--json", "a.py", end)
    report = json.loads(done.stdout)
    gap = next(gap for gap in report["gaps"] if gap["kind"] == "held-at-end")
    assert ([], "partly-checked", 0) == (report["on_device"], report["outcome"], done.returncode), done.stdout
    assert (1 << 20) <= gap["count"] < 2 << 20
    assert ["killed"] == gap["codes"]


KERNEL_THAT_HOLDS = """
import os, subprocess, sys
SOURCE = 'extern "C" __global__ void take(int held) { if (held) malloc(100); }'
def work(held):
    import cudatool as ct
    ct.compile(SOURCE, "take")[1, 1](held)
    ct.synchronize()
if __name__ == "__main__":
    way, held = sys.argv[1:]
    if way == "subprocess":
        subprocess.run([sys.executable, "-c", f"import a; a.work({held})"], check=True)
    elif not os.fork():
        work(int(held))
        os._exit(0)
    else:
        os.wait()
"""


@pytest.mark.parametrize("way", ["subprocess", "fork"])
@pytest.mark.parametrize(("held", "found"), [("0", []), ("1", [1])])
def test_what_kernels_of_a_process_never_free_is_a_leak(run_warm, tmp_path, way, held, found):
    (tmp_path / "a.py").write_text(KERNEL_THAT_HOLDS)
    done = run_warm("sanitize", "--checks", "race,leak", "--json", "a.py", way, held)
    report = json.loads(done.stdout)
    assert (len(found), found) == (done.returncode, [one["count"] for one in report["on_device"]]), done.stdout
    assert {"findings" if found else "clean"} == {one["outcome"] for one in report["processes"] if one["operations"]}


def test_program_of_which_no_process_was_checked_is_not_checked(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(HOLDING.replace("    " + WORK, ""))
    done = run_warm("sanitize", "--checks", "leak", "--json", "a.py", "os.kill(os.getpid(), signal.SIGTERM)")
    report = json.loads(done.stdout)
    assert {"not-checked"} == {one["outcome"] for one in report["processes"]}
    assert ("not-checked", 2) == (report["outcome"], done.returncode)


def test_race_in_a_child_is_found_and_fails_the_run(run_warm, tmp_path):
    racy = (Path(__file__).parents[2] / "samples" / "pipeline_racy.py").as_posix()
    (tmp_path / "a.py").write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {racy!r}], check=True)")
    done = run_warm("sanitize", "--format", "text", "--format", "json=a.json", "--html", "a.html", "a.py")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "a.json").read_text())
    program, child = report["processes"]
    assert ["not-checked", "findings"] == [program["outcome"], child["outcome"]]
    assert child["name"].endswith("(pipeline_racy.py)")
    assert {child["name"]} == {name for finding in report["findings"] for name in finding["processes"]}
    assert [] == report["gaps"]
    assert f"in: {child['name']}" in " ".join(done.stdout.split())
    assert len(list(tmp_path.glob("a.*.html"))) == 1


def test_process_that_cannot_be_recorded_is_a_gap_in_the_verdict(run_command, tmp_path):
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)); {WORK}"
    (tmp_path / "a.py").write_text(
        f"import os, subprocess, sys\n{WORK}\n"
        "subprocess.run([sys.executable, '-S', '-c', ''], check=True)\n"
        "subprocess.run([sys.executable, '-c', ''], check=True, env={})\n"
        "subprocess.run(['true'], check=True)\n"
        "subprocess.run([sys.executable, '-c', 'import os; os.execvp(\"true\", [\"true\"])'], check=True)\n"
        f"subprocess.run([sys.executable, '-c', {limited!r}])\n"
        f"sleeps = {_UNTIL_TOLD!r}\n"
        "child = subprocess.Popen([sys.executable, '-c', sleeps], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "child.stdout.readline()  # it has begun\n"
    )
    done = run_command("sanitize", "--json", "a.py", stdin=subprocess.DEVNULL)  # with pipes, which no limit ends
    (tmp_path / "end").touch()
    gaps = {gap["kind"]: gap for gap in json.loads(done.stdout)["gaps"]}
    assert {"child-processes", "replaced"} == gaps.keys()
    assert 5 == gaps["child-processes"]["count"], gaps
    names = " / ".join(gaps["child-processes"]["names"])
    assert "true" in names and "still running" in names and "cannot be written: File too large" in names
    assert ["true"] == gaps["replaced"]["names"]
    assert 1 == done.stderr.count(" is not recorded: "), done.stderr
    assert (0, "Traceback") == (done.returncode, "Traceback" if "Traceback" not in done.stderr else done.stderr)


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("{python} work.py 'a b'", 0),
        ("./work", 0),
        ("{python} work.py; true", 1),
        ("{python} work.py;true", 1),
        ("{python} work.py > out", 1),
        ("N=1 {python} work.py $N", 1),
        ("true", 1),
    ],
)
def test_a_shell_that_runs_one_python_command_is_no_gap(run_warm, tmp_path, command, unknown):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "work").write_text(f"#!{sys.executable}\n{WORK}")
    (tmp_path / "work").chmod(0o755)
    command = command.format(python=sys.executable)
    (tmp_path / "a.py").write_text(f"import subprocess\n{WORK}\nsubprocess.run({command!r}, shell=True, check=True)\n")
    report = json.loads(run_warm("sanitize", "--json", "a.py").stdout)
    assert [("child-processes", 1)] * unknown == [(gap["kind"], gap["count"]) for gap in report["gaps"]]
    assert (command != "true") + 1 == max(1, len(report["processes"]))


def test_a_command_of_a_shell_that_fails_is_a_gap(run_warm, tmp_path):
    command = f"{sys.executable} -c 'exit(3)'"
    (tmp_path / "a.py").write_text(f"import subprocess\n{WORK}\nsubprocess.run({command!r}, shell=True)\n")
    (gap,) = json.loads(run_warm("sanitize", "--json", "a.py").stdout)["gaps"]
    said = f"{Path(sys.executable).name} -c failed with exit status 3"
    assert ("failed-processes", 1, [said]) == (gap["kind"], gap["count"], gap["names"])


FAILING = f"""
import multiprocessing, os, subprocess, sys

def fail():
    sys.exit("no")

if __name__ == "__main__":
    child_left = subprocess.Popen([sys.executable, "-c", "exit(3)"])  # nothing takes its exit status
    for way in ("fork", "forkserver"):
        child = multiprocessing.get_context(way).Process(target=fail)
        child.start(); child.join()
    subprocess.run([sys.executable, "-c", "{WORK}; import os; os.kill(os.getpid(), 9)"])
    with multiprocessing.get_context("fork").Pool(1) as pool:  # which ends its worker by SIGTERM
        pool.apply(abs, (1,))
    subprocess.run([sys.executable, "-c", ""], check=True)
    {WORK}
    os.waitid(os.P_PID, child_left.pid, os.WEXITED | os.WNOWAIT)
"""


def test_process_that_failed_is_a_gap_in_the_verdict(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(FAILING)
    done = run_warm("sanitize", "--json", "a.py")
    (gap,) = json.loads(done.stdout)["gaps"]
    expected = ["python -c failed with exit status 3", "os.fork failed with exit status 1", "was ended by SIGKILL"]
    assert ("failed-processes", 4, 0) == (gap["kind"], gap["count"], done.returncode), done.stdout
    assert all(any(end in name for name in gap["names"]) for end in expected), gap["names"]


def test_processes_that_use_no_device_leave_no_file_and_import_nothing_for_it(run_warm, tmp_path):
    plain = "import sys; print(len(sys.modules.keys() & {'numpy', 'json', 'subprocess', 'cudatool.trace'}))"
    (tmp_path / "a.py").write_text(
        f"import subprocess, sys\nfor _ in range(10): subprocess.run([sys.executable, '-c', {plain!r}], check=True)"
    )
    done = run_warm("run", "-o", "a.ctrace", "a.py")
    assert (["0"] * 10, ["a.ctrace"]) == (done.stdout.split(), [path.name for path in tmp_path.glob("*.ctrace")])
    assert 10 == len(read(tmp_path / "a.ctrace").of_kind(Kind.CHILD_RECORDED))


def test_without_children_the_program_alone_is_recorded(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}], check=True)"
    )
    done = run_warm("run", "--no-children", "-o", "a.ctrace", "a.py")
    assert (0, ["a.ctrace"]) == (done.returncode, [path.name for path in tmp_path.glob("*.ctrace")]), done.stderr


@pytest.mark.parametrize("command", ["run", "sanitize"])
def test_processes_that_are_not_recorded_have_the_program_s_device_all_the_same(run_warm, tmp_path, command):
    work = "from cuda.core import Device; print(Device().name, Device().properties.multiprocessor_count >= 1)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}], check=True)"
    (tmp_path / "a.py").write_text(
        f"import subprocess, sys\n"
        f"for code in ({work!r}, {nested!r}):\n"
        f"    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    done = run_warm(command, "--no-children", "--device", "sim", "a.py")
    assert 2 == (done.stdout + done.stderr).count("cudatool software device True"), done.stderr


def test_traces_of_a_program_that_was_killed_or_replaced_are_found_together(run_warm, tmp_path):
    start = f"import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}], check=True)\n"
    (tmp_path / "killed.py").write_text(f"{start}os.kill(os.getpid(), 9)")
    done = run_warm("run", "-o", "killed.ctrace", "killed.py")
    assert -signal.SIGKILL == done.returncode
    killed = read(tmp_path / "killed.ctrace")
    assert (Ending.KILLED, 1) == (killed.ending, len(children_of(killed)))
    (tmp_path / "replaced.py").write_text(f"{start}os.execv(sys.executable, [sys.executable, '-c', {WORK!r}])")
    done = run_warm("sanitize", "--json", "replaced.py")
    report = json.loads(done.stdout)
    assert ([2, 2], []) == ([one["operations"] for one in report["processes"][1:]], report["gaps"]), done.stderr


def test_what_records_may_wait_for_the_import_before_which_it_begins(tmp_path, monkeypatch):
    import importlib
    import sys

    from cudatool.loading.after_import import AfterImport
    from cudatool.processes import child
    from cudatool.recording import children

    (tmp_path / "warp.py").write_text("value = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "warp", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for command in [name for name in sys.modules if name.startswith("cudatool.cli")]:
        monkeypatch.delitem(sys.modules, command)
    imported: list[int] = []
    monkeypatch.setattr(
        children, "begin", lambda _: AfterImport({"warp": lambda warp: imported.append(warp.value)}).start()
    )
    sys.meta_path.insert(0, child._BeforeImport())
    importlib.import_module("warp")
    monkeypatch.delitem(sys.modules, "warp")
    assert [42] == imported


def test_streams_that_a_forked_process_knew_are_no_use_of_the_device(tmp_path):
    import numpy as np

    from cudatool.recording import children
    from cudatool.trace.events import RECORD

    settings = children.ChildSettings(str(tmp_path / "a.ctrace"), "run", True, False, (), "kernels")
    recorder = children._ChildRecorder(settings, {})
    rows = np.zeros(2, RECORD)
    rows["kind"] = Kind.STREAM_CREATE
    recorder.write_rows(rows, [""])
    assert [] == list(tmp_path.iterdir())
    rows["kind"][1] = Kind.DEVICE_SYNCHRONIZE
    recorder.write_rows(rows[1:], [""])
    recorder.close()
    (path,) = tmp_path.iterdir()
    assert [Kind.STREAM_CREATE, Kind.STREAM_CREATE, Kind.DEVICE_SYNCHRONIZE][1:] == read(path).records["kind"].tolist()[
        1:
    ]


def test_ranges_of_a_process_that_used_no_device_for_long_are_not_lost_without_a_word(tmp_path, monkeypatch):
    from cudatool.recording import children
    from cudatool.trace import hooks

    monkeypatch.setattr(children, "_MOST_KEPT", 3)
    recorder = children._ChildRecorder(
        children.ChildSettings(str(tmp_path / "a.ctrace"), "run", True, False, (), "kernels"), {}
    )
    for kind in (Kind.RANGE_PUSH, Kind.RANGE_POP) * 3 + (Kind.DEVICE_SYNCHRONIZE,):
        recorder(hooks.own_event(kind))
    recorder.close()
    (path,) = tmp_path.iterdir()
    trace = read(path)
    kinds = [Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.RANGE_PUSH, Kind.WARNING, Kind.DEVICE_SYNCHRONIZE]
    assert kinds == trace.records["kind"].tolist()
    (warning,) = trace.of_kind(Kind.WARNING)
    assert WarningFlag.LOST == warning["flags"]
    assert trace.names[warning["name"]].startswith("3 ranges and the like")
