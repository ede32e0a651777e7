"""What may stand where a program is to be named, and what is said where it is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cudatool.errors import UsageError
from cudatool.workload import Start, Workload

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.mark.parametrize("python", [[], ["python"], ["python3"], [f"python{VERSION}"], [sys.executable]])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "-x"], Workload("train.py", ("-x",))),
        (["-m", "json.tool", "-x"], Workload("json.tool", ("-x",), Start.MODULE)),
        (["-c", "print(1)", "-x"], Workload("print(1)", ("-x",), Start.CODE)),
        (["-", "-x"], Workload("-", ("-x",), Start.STDIN)),
    ],
)
def test_python_may_stand_before_the_program(python, words, expected):
    assert expected == Workload.parse([*python, *words])


def test_a_file_named_python_is_a_program(folder):
    (folder / "python").write_text("")
    assert Workload("python", ("x",)) == Workload.parse(["python", "x"])


def test_a_command_is_the_script_that_the_shell_would_run():
    script = os.path.join(os.path.dirname(sys.executable), "pytest")
    assert Workload(script, ("tests",)) == Workload.parse(["pytest", "tests"])


def _command(folder: Path, name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text(head)
    (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))


def test_a_command_whose_path_is_long_starts_python_from_its_second_line(folder, monkeypatch):
    head = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"
    _command(folder, "tool", head, monkeypatch)
    assert str(folder / "bin" / "tool") == Workload.parse(["tool"]).target


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("#!/bin/sh\necho\n", "not a Python program"),
        ("\x7fELF", "not a Python program"),
        ("#!/elsewhere/bin/python3\n", "belongs to /elsewhere/bin/python3, and cudatool to"),
    ],
)
def test_a_command_that_cannot_run_here_is_refused(folder, monkeypatch, head, message):
    _command(folder, "tool", head, monkeypatch)
    with pytest.raises(UsageError, match=message):
        Workload.parse(["tool"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a Python program to run"),
        (["-m"], "name a module"),
        (["-c"], "needs code"),
        (["python"], "no interactive session"),
        (["python", "-O", "train.py", "a b"], "python -O -m cudatool sanitize train.py 'a b'"),
        (["python2", "train.py"], "not in python2; install it there"),
        (["mpirun", "-n", "2", "train.py"], r"mpirun \[OPTIONS\] python -m cudatool sanitize PROGRAM.py"),
        (["uv", "run", "train.py"], "uv run python -m cudatool sanitize PROGRAM.py"),
    ],
)
def test_what_cannot_be_run_says_what_to_type(words, message):
    with pytest.raises(UsageError, match=message):
        Workload.parse(words, "sanitize")


def test_another_environment_is_not_taken_for_ours_though_its_binary_is_the_same(folder):
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(UsageError, match="install it there"):
        Workload.parse([str(folder / "bin" / "python"), "train.py"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.py", "did you mean 'train.py'"),
        ("train", "did you mean 'train.py'"),
        ("zzz", "name a Python program"),
        ("zzz.py", "name a Python program"),  # the ending alone is no likeness
        ("pytets", "did you mean 'pytest'"),
    ],
)
def test_a_missing_program_suggests_one_that_is_there(name, message):
    with pytest.raises(UsageError, match=message):
        Workload.parse([name]).check()


def test_the_files_of_a_module_are_known(folder):
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    expected = {str(folder / "pkg" / "__init__.py"), str(folder / "pkg" / "__main__.py")}
    assert expected == set(Workload.parse(["-m", "pkg"]).files)
    assert (str(folder / "train.py"),) == Workload.parse(["-m", "train"]).files
    assert () == Workload.parse(["-c", "pass"]).files
    assert () == Workload.parse(["-m", "no.such.module"]).files


CODE = "import sys, __main__\nprint(sys.argv, __name__, repr(sys.path[0]), __main__.__dict__ is globals(), globals().get('__file__'))\n"


@pytest.mark.parametrize("end", ["", "1 / 0", "sys.exit(7)", "x = (1 +", "def f():\n    raise KeyError('k')\nf()"])
@pytest.mark.parametrize("python", [[], ["python"]])
def test_code_sees_and_says_what_it_does_under_plain_python(run_command, plain_python, python, end):
    ours = run_command("run", "-o", "t.ctrace", *python, "-c", CODE + end, "a", "-b")
    plain = plain_python("-c", CODE + end, "a", "-b")
    assert (plain.returncode, plain.stdout) == (ours.returncode, ours.stdout)
    said = ours.stderr.split("cudatool: using", 1)[1].split("\n", 1)[1].split("\nDevice  ", 1)[0]
    assert plain.stderr.rstrip("\n") == said.rstrip("\n")


RACY = Path(__file__).parents[1] / "programs" / "two_streams.py"


def test_code_is_sanitized(run_command):
    done = run_command("sanitize", "-c", f"exec(open({str(RACY)!r}).read())", environment={"PYTHONPATH": "x"})
    assert done.returncode == run_command("sanitize", RACY).returncode, done.stderr
    assert "checked: " in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["sanitize", "--format", "json=train.py"],
        ["sanitize", "--format", "sarif=link"],
        ["sanitize", "--html", "hard"],
        ["run", "-o", "train.py"],
        ["run", "-f", "-o", "hard"],
        ["run", "-f", "--html", "link.html"],
    ],
)
def test_no_output_replaces_the_program(run_warm, folder, options):
    (folder / "train.py").write_text("print('must not run')")
    for name in ("link", "link.html"):
        (folder / name).symlink_to("train.py")
    (folder / "hard").hardlink_to(folder / "train.py")
    done = run_warm(*options, "train.py")
    assert (2, "") == (done.returncode, done.stdout)
    assert "this command reads that file; name another" in done.stderr
    assert "print('must not run')" == (folder / "train.py").read_text()
    assert folder.joinpath("link").is_symlink()
