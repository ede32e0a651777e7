"""`cudatool run` runs a program as plain Python does, and leaves a trace of it."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

from cudatool.trace.events import Kind
from cudatool.trace.reader import read

_FACTS = """
import sys, os, __main__
print(sys.argv)
print(__name__, __file__ if '__file__' in globals() else None, __main__.__dict__ is globals())
print(sys.path[0] == os.path.realpath(os.path.dirname(__file__)), __builtins__ is not None)
"""


def _own_lines(stderr: str) -> str:
    """What is left of stderr without what cudatool says itself, which comes before and after the program."""
    return stderr.split("cudatool: using", 1)[1].split("\n", 1)[1].split("\nDevice  ", 1)[0].rstrip("\n")


def test_script_sees_what_plain_python_shows_it(run_warm, plain_python, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "facts.py").write_text(_FACTS)
    ours = run_warm("run", "sub/facts.py", "--flag", "-o", "x y")
    plain = plain_python("sub/facts.py", "--flag", "-o", "x y")
    assert ours.returncode == 0
    assert ours.stdout == plain.stdout


@pytest.mark.parametrize("words", [["1", "--two"], ["-m", "--help", "-o", "x"]])
def test_module_sees_what_plain_python_shows_it(run_warm, plain_python, tmp_path, words):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "__main__.py").write_text("import sys\nprint(sys.argv, __name__, __package__, __file__)\n")
    ours = run_warm("run", "-m", "pkg", *words)
    assert ours.stdout == plain_python("-m", "pkg", *words).stdout
    assert ours.returncode == 0


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    raise ValueError('no')\nf()\n",
        "x = (1 +\n",
        "import sys\nsys.exit(7)\n",
        "import sys\nsys.exit('a message')\n",
        "import sys\nsys.exit()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('outer') from e\n",
        "import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__, file=sys.stderr)\n1 / 0\n",
        "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('no')\n",
        "import sys\nsys.excepthook = lambda *a: sys.exit(9)\nraise ValueError('no')\n",
        "class Text:\n    def __str__(self): return 1 / 0\nraise SystemExit(Text())\n",
        "import atexit\natexit.register(print, 'at exit')\n",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread done'))).start()\n"
        "print('main done')\n",
    ],
)
def test_status_and_messages_are_those_of_plain_python(run_command, plain_python, tmp_path, source):
    (tmp_path / "program.py").write_text(source)
    ours, plain = run_command("run", "program.py"), plain_python("program.py")
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    assert _own_lines(ours.stderr) == plain.stderr.rstrip("\n")


def test_what_is_imported_after_the_program_is_not_from_beside_it(plain_python, tmp_path):
    (tmp_path / "rich.py").write_text("raise SystemExit('a program of the user')")
    (tmp_path / "program.py").write_text("print('done')")
    done = plain_python("-P", "-m", "cudatool", "run", "--device", "sim", "program.py")  # -P: as the installed command
    assert (0, "done\n") == (done.returncode, done.stdout)
    assert "Device  " in done.stderr


@pytest.mark.parametrize("ending", ["", "x = (1 +\n", "1 / 0\n"])
def test_code_from_standard_input_runs_as_under_plain_python(run_command, tmp_path, ending):
    source = (
        "import sys\nprint(sys.argv, __name__, '__file__' in globals(), sys.path[0], [sys.stdin.read(), 'ä'])\n"
        + ending
    )
    ours = run_command("run", "-o", "a.ctrace", "-", "x", "-o", input=source)
    plain = subprocess.run(
        [sys.executable, "-", "x", "-o"], cwd=tmp_path, input=source, capture_output=True, text=True, timeout=240
    )
    assert (plain.returncode, plain.stdout) == (ours.returncode, ours.stdout)
    assert plain.stderr.rstrip("\n") == _own_lines(ours.stderr)


def test_standard_input_cannot_be_run_several_times(run_command):
    done = run_command("sanitize", "--explore", "2", "-", input="print(1)")
    assert 2 == done.returncode
    assert "standard input can be read once" in done.stderr


@pytest.mark.parametrize("program", ["app", "app/", "./app", "app.pyz"])
@pytest.mark.parametrize("words", [[], ["fail"]])
def test_directory_or_zip_file_with_a_main_runs_as_under_plain_python(run_warm, plain_python, tmp_path, program, words):
    files = {
        "__main__.py": "import sys, beside\nprint(__name__, __file__, repr(__package__), sys.argv, sys.path[0])\n"
        "print(beside.x, __spec__.name, sorted(set(globals()) - {'__annotations__'}))\n"
        "if sys.argv[1:]: beside.fail()\n",
        "beside.py": "x = 7\ndef fail():\n    raise SystemExit(x)\n",
    }
    (tmp_path / "app").mkdir()
    for name, text in files.items():
        (tmp_path / "app" / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    ours, plain = run_warm("run", program, *words), plain_python(program, *words)
    assert (7 if words else 0, plain.stdout, plain.stderr.rstrip("\n")) == (
        ours.returncode,
        ours.stdout,
        _own_lines(ours.stderr),
    )
    assert plain.returncode == ours.returncode
    (trace,) = tmp_path.glob("*.ctrace")
    assert trace.name.startswith("app.")


def test_trace_of_a_failed_program_is_kept_and_says_so(run_warm, tmp_path):
    (tmp_path / "program.py").write_text("raise SystemExit(5)")
    assert run_warm("run", "-o", "t.ctrace", "program.py").returncode == 5
    assert read(tmp_path / "t.ctrace").header["exit_status"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name a Python program"),
        (["run", "missing.py"], "missing.py does not exist"),
        (["run", "."], ". is a directory without a __main__.py"),
        (["run", "old.ctrace.gz"], "old.ctrace.gz is a compressed file, not a program; unpack it first"),
        (["sanitize", "old.ctrace.gz"], "old.ctrace.gz is a compressed file, not a program; unpack it first"),
        (
            ["snapshot", "old.ctrace.gz"],
            "compressed; only PyTorch's snapshots are read so, as .xz or .gz: unpack it first",
        ),
        (
            ["snapshot", "new.pickle.zst"],
            "compressed; only PyTorch's snapshots are read so, as .xz or .gz: unpack it first",
        ),
        (["snapshot", "-"], "a recording is read from a file, not from standard input: give its name"),
        (["run", "-m", "no.such.module"], "there is no module"),
        (["run", "--device", "tpu", "ok.py"], "'tpu' is not a device"),
        (["run", "--device", "sim:speed=9", "ok.py"], "not an option of sim"),
        (["run", "--device", "sim:memory=lots", "ok.py"], "'sim:memory=lots': memory: 'lots' is not a size"),
        (["run", "--device", "sim:seed=x", "ok.py"], "'sim:seed=x': seed: 'x' is not a whole number"),
        (["run", "--device", "sim:schedule=eager", "ok.py"], "not a schedule"),
        (["run", "--no-such-option", "ok.py"], "No such option"),
        (["run", "-o", "no/such/dir/t.ctrace", "ok.py"], "no/such/dir/t.ctrace"),
        (["run", "--html", "no/such/dir/p.html", "ok.py"], "no/such/dir/p.html"),
        (["run", "rmm.csv"], "rmm.csv is RMM's log of allocations, not a program; try `cudatool snapshot rmm.csv`"),
        (["sanitize", "rmm.csv"], "rmm.csv is RMM's log of allocations, not a program"),
        (["no-such-command"], "There is no command"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(run_here, tmp_path, arguments, message):
    (tmp_path / "ok.py").write_text("print('must not run')")
    (tmp_path / "rmm.csv").write_text("Thread,Time,Action,Pointer,Size,Stream\n")
    (tmp_path / "new.pickle.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    (tmp_path / "old.ctrace.gz").write_bytes(gzip.compress(b"a trace of ours"))
    done = run_here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_existing_files_are_not_overwritten_without_force(run_warm, tmp_path):
    (tmp_path / "ok.py").write_text("")
    for name in ("precious.ctrace", "precious.html"):
        (tmp_path / name).write_text("precious")
    for arguments in (["-o", "precious.ctrace"], ["--html", "precious.html"]):
        done = run_warm("run", *arguments, "ok.py")
        assert done.returncode == 2
        assert "exists" in done.stderr
    assert (tmp_path / "precious.ctrace").read_text() == "precious"
    assert (tmp_path / "precious.html").read_text() == "precious"
    assert run_warm("run", "-f", "-o", "precious.ctrace", "ok.py").returncode == 0
    assert read(tmp_path / "precious.ctrace").header["exit_status"] == 0


def test_program_of_cuda_core_leaves_its_driver_calls_in_the_trace(run_warm, tmp_path):
    (tmp_path / "program.py").write_text(
        "from cuda.core import Device\n"
        "device = Device(); device.set_current()\n"
        "stream = device.create_stream()\n"
        "buffer = device.memory_resource.allocate(1 << 20, stream=stream)\n"
        "buffer.fill(b'x', stream=stream)\n"
        "stream.sync()\n"
        "buffer.close()\n"
    )
    done = run_warm("run", "-o", "t.ctrace", "--html", "p.html", "program.py")
    assert done.returncode == 0
    trace = read(tmp_path / "t.ctrace")
    kinds = [int(kind) for kind in trace.records["kind"]]
    from cudatool.trace.events import Kind

    wanted = [Kind.STREAM_CREATE, Kind.MEM_ALLOC, Kind.MEMSET, Kind.STREAM_SYNCHRONIZE, Kind.EXECUTION, Kind.MEM_FREE]
    positions = [kinds.index(kind) for kind in wanted]
    assert positions == sorted(positions)
    fill = trace.of_kind(Kind.MEMSET)[0]
    assert int(fill["size"]) == 1 << 20
    assert [(frame.function, frame.line) for frame in trace.stack(int(fill["stack"]))] == [("<module>", 5)]
    assert "peak 1 MiB allocated" in " ".join(done.stderr.split())
    assert (tmp_path / "p.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_no_stacks_records_none(run_warm, tmp_path):
    (tmp_path / "program.py").write_text(
        "from cuda.core import Device\nDevice().set_current()\nDevice().create_stream()\n"
    )
    assert run_warm("run", "--no-stacks", "-o", "t.ctrace", "program.py").returncode == 0
    assert set(read(tmp_path / "t.ctrace").records["stack"].tolist()) == {0}


def test_what_is_never_waited_for_still_runs_and_is_recorded(run_warm, tmp_path):
    (tmp_path / "program.py").write_text(
        "from cuda.core import Device\n"
        "device = Device(); device.set_current()\n"
        "buffer = device.memory_resource.allocate(64, stream=device.default_stream)\n"
        "buffer.fill(b'x', stream=device.default_stream)\n"
    )
    from cudatool.trace.events import Kind

    assert run_warm("run", "-o", "t.ctrace", "program.py").returncode == 0
    assert len(read(tmp_path / "t.ctrace").of_kind(Kind.EXECUTION)) == 1


def test_program_that_leaves_an_interpreter_behind_ends_with_its_status(run_command, tmp_path):
    (tmp_path / "a.py").write_text(
        "import sys\n"
        "interpreters = __import__('_interpreters' if sys.version_info >= (3, 13) else '_xxsubinterpreters')\n"
        "kept = interpreters.create()\nsys.exit(3)\n"
    )
    done = run_command("run", "-o", "a.ctrace", "a.py")
    assert 3 == done.returncode, done.stderr


def test_program_that_leaves_an_executor_open_ends(run_command, tmp_path):
    (tmp_path / "pool.py").write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\n"
        "print(pool.submit(lambda: 'from a thread').result())\n"
    )
    done = run_command("run", "-o", "t.ctrace", "pool.py")
    assert (0, "from a thread\n") == (done.returncode, done.stdout)


def test_page_lies_beside_the_trace_and_its_option_takes_no_program(run_warm, tmp_path):
    (tmp_path / "ok.py").write_text("print('ran')")
    done = run_warm("run", "-o", "t.ctrace", "--html", "ok.py")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert (tmp_path / "t.html").read_text().startswith("<!DOCTYPE html>")
    for words in (["-o", "u.ctrace", "--html", "-m", "ok"], ["--html", "--force", "-o", "v.ctrace", "ok.py"]):
        done = run_warm("run", *words)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert {"t.html", "u.html", "v.html"} == {path.name for path in tmp_path.glob("*.html")}


@pytest.mark.parametrize("after", ["", "; os.rmdir(os.getcwd())"], ids=["elsewhere", "nowhere"])
@pytest.mark.parametrize("words", [("run", "-o", "x.ctrace"), ("sanitize", "--allow-empty", "--format", "json=x.json")])
def test_files_are_named_from_where_the_command_began(run_warm, tmp_path, words, after) -> None:
    (tmp_path / "x.py").write_text(f"import os; os.makedirs('a/b'); os.chdir('a/b'){after}")
    done = run_warm(*words, "x.py")
    assert 0 == done.returncode, done.stderr
    assert re.search(rf"^Wrote {words[-1].rpartition('=')[2]}( |$)", done.stderr, re.MULTILINE)


def test_forked_child_ends_without_a_summary(run_command, tmp_path):
    (tmp_path / "forks.py").write_text(
        "import os, sys\nif os.fork() == 0:\n    sys.exit(7)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = run_command("run", "-o", "t.ctrace", "forks.py")
    assert (done.returncode, done.stdout) == (0, "7\n")
    assert done.stderr.count("Wrote t.ctrace") == 1


def test_recording_that_another_run_overwrites_is_an_error_and_no_empty_summary(run_warm, tmp_path):
    (tmp_path / "a.py").write_text(
        "import subprocess, sys\nimport cudatool as ct\nct.empty(1, 'f4')\n"
        "other = [sys.executable, '-m', 'cudatool', 'run', '-f', '-o', 't.ctrace', '-c', '0']\n"
        "subprocess.run(other, check=True, stderr=subprocess.DEVNULL)\n"
    )
    done = run_warm("run", "--no-children", "-o", "t.ctrace", "a.py")
    assert 2 == done.returncode
    assert re.search(r"error: the recording is lost: t\.ctrace was overwritten by process \d+", done.stderr)
    assert "No CUDA activity" not in done.stderr


def test_program_that_did_nothing_on_the_device_is_told_what_is_recorded(run_warm, tmp_path):
    (tmp_path / "nothing.py").write_text("")
    done = run_warm("run", "nothing.py")
    assert "No CUDA activity was recorded." in done.stderr
    assert "Next:" not in done.stderr


def test_library_that_cannot_use_the_software_device_is_named(run_warm, tmp_path):
    (tmp_path / "cupy.py").write_text("")  # what matters is its name
    (tmp_path / "a.py").write_text("import cupy\nraise RuntimeError('cudaErrorCallRequiresNewerDriver')\n")
    done = run_warm("run", "a.py")
    assert done.returncode == 1
    assert "CuPy is recorded on a GPU only." in done.stderr.splitlines()


@pytest.mark.parametrize(("name", "typed"), [("an odd name", "'an odd name.ctrace'"), ("-f", "./-f.ctrace")])
def test_next_command_can_be_pasted_into_a_shell(run_warm, tmp_path, name, typed):
    (tmp_path / f"{name}.py").write_text("import cudatool as ct\nct.empty(1, 'f4')\n")
    done = run_warm("run", "-o", f"./{name}.ctrace", f"./{name}.py")
    assert f"Next: cudatool snapshot {typed} --html" in done.stderr
    assert "1 allocation\n" in done.stderr.replace(" \n", "\n")


def test_summary_says_that_memory_ran_out(run_warm, tmp_path):
    (tmp_path / "large.py").write_text("import cudatool as ct\nct.empty(1 << 40, 'u1')\n")
    done = run_warm("run", "large.py")
    assert done.returncode == 1
    assert "1 failed: out of memory" in " ".join(done.stderr.split())


@pytest.mark.some_of("closed", ["2>&-", ">&-", "<&- >&- 2>&-"], 1)
@pytest.mark.parametrize("command", ["run", "sanitize"])
def test_program_without_standard_streams_runs(tmp_path, command, closed):
    source = "import cudatool as ct, pathlib\nct.zeros(1, 'f4')\npathlib.Path('ran').touch()\n"
    (tmp_path / "ok.py").write_text(source)
    words = [sys.executable, "-c", "from cudatool.cli import main; main()", command, "ok.py"]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *words]
    assert subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, timeout=240).returncode == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change", ["sys.stdout.close()", "sys.stdout = sys.stderr = io.StringIO()", "sys.stderr = open('x', 'w')"]
)
def test_program_that_takes_the_standard_streams_away_keeps_no_report_back(run_warm, tmp_path, change):
    (tmp_path / "odd.py").write_text(f"import cudatool as ct, io, sys\nct.zeros(1, 'f4')\n{change}\n")
    done = run_warm("run", "-o", "t.ctrace", "odd.py")
    assert done.returncode == 0
    assert "Wrote t.ctrace" in done.stderr
    done = run_warm("sanitize", "odd.py")
    assert done.returncode == 0
    assert "no findings" in done.stdout


def test_times_of_the_software_device_are_called_simulated(run_warm, tmp_path):
    (tmp_path / "program.py").write_text("import cudatool as ct\nct.ops.relu(ct.zeros(100, 'f4')).get()\n")
    done = run_warm("run", "-o", "t.ctrace", "program.py")
    assert " on the device (simulated)" in " ".join(done.stderr.split())
    assert "Device time (simulated)" in run_warm("snapshot", "t.ctrace").stdout
    (sites,) = [
        device["at_peak"] for device in json.loads(run_warm("snapshot", "t.ctrace", "--json").stdout)["devices"]
    ]
    assert [800] == [site["requested"] for site in sites]


@pytest.mark.parametrize("closed", ["1", "2", "1, 2", "0, 1, 2"])
def test_a_program_that_closes_its_streams_keeps_its_status(run_warm, tmp_path, closed):
    source = f"import os, cudatool as ct\nct.full(3, 1.0)\nfor one in ({closed},): os.close(one)\nct.full(4, 1.0)\n"
    (tmp_path / "closing.py").write_text(source)
    assert 0 == run_warm("run", "-o", "closing.ctrace", "closing.py").returncode
    assert 2 == len(read(tmp_path / "closing.ctrace").of_kind(Kind.BLOCK_ALLOC))


RESET = """
from cuda.bindings import driver
driver.cuInit(0)
for size in (16 << 20, 1 << 20):
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    driver.cuMemAlloc(size)
    driver.cuDevicePrimaryCtxReset(0)
"""


def test_a_reset_of_the_device_is_told_once(run_warm, tmp_path):
    (tmp_path / "program.py").write_text(RESET)
    done = run_warm("run", "--device", "sim", "-o", "t.ctrace", "program.py")
    shown = run_warm("snapshot", "t.ctrace")
    for text in (done.stderr, shown.stdout):
        assert " ".join(text.split()).count("device 0 was reset: memory from before is shown as held") == 1, text
