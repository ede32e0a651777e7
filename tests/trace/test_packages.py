"""Packages in folders whose path does not tell: made by `pip install --target`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cudatool.trace import reader
from cudatool.trace.follow import Follower
from cudatool.trace.frames import call_site, user_files
from cudatool.trace.model import Frame, PackageFrame
from cudatool.trace.packages import is_part, package_of

RECORD = """heavy/__init__.py,sha256=abc,3
heavy/deep/layer.py,sha256=abc,3
"odd,name.py",sha256=abc,3
single.py,sha256=abc,3
heavy-1.0.dist-info/RECORD,,
../../bin/heavy,sha256=abc,3
"""
PROGRAM = """
import sys
sys.path.insert(0, "libraries")
import heavy
from own import allocate
import cudatool
with cudatool.record("out.ctrace", device="sim"):
    heavy.layer(allocate)
"""
HEAVY = "def layer(allocate):\n    return allocate(helper)\n\n\ndef helper(make):\n    return make()\n"
OWN = "import cudatool\n\n\ndef allocate(helper):\n    return helper(lambda: cudatool.empty(1000))\n"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder in which one package is installed, and a module of the user's lies."""
    folder = tmp_path / "libraries"
    (folder / "heavy-1.0.dist-info").mkdir(parents=True)
    (folder / "heavy-1.0.dist-info" / "RECORD").write_text(RECORD)
    (folder / "heavy").mkdir()
    (folder / "heavy" / "__init__.py").write_text(HEAVY)
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.fixture
def on_the_path(target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package_of.cache_clear()
    monkeypatch.setattr(sys, "path", [*sys.path, str(target), Path("/no text")])
    return target


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("heavy/deep/layer.py", "heavy"),
        ("single.py", "single.py"),
        ("own.py", ""),
        ("heavy2/layer.py", ""),
        ("heavy-1.0.dist-info/x.py", "heavy-1.0.dist-info"),
    ],
)
def test_a_file_is_of_what_a_distribution_lists_and_of_nothing_else(on_the_path, file, package):
    assert (str(on_the_path / package) if package else "") == package_of(str(on_the_path / file))


def test_a_folder_that_is_not_searched_for_modules_has_no_packages(target):
    package_of.cache_clear()
    assert "" == package_of(str(target / "heavy" / "__init__.py"))


def test_a_part_is_the_file_itself_or_lies_in_the_folder():
    packages = ("/opt/libs/heavy", "C:\\libs\\six.py", "C:\\libs\\torch")
    assert [True, False, True, True] == [
        is_part(file, packages)
        for file in ("/opt/libs/heavy/a.py", "/opt/libs/heavy2/a.py", "C:\\libs\\six.py", "C:\\libs\\torch\\nn.py")
    ]


def test_a_recording_names_the_packages_of_its_stacks_and_reports_show_the_users_lines(target):
    folder = target.parent
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    trace = reader.read(folder / "out.ctrace")
    assert [str(target / "heavy")] == trace.header["installed"]
    stack = max((trace.stack(index) for index in range(len(trace.stacks))), key=len)
    assert ["own.py", "__init__.py", "own.py", "__init__.py", "program.py"] == [Path(one.file).name for one in stack]
    assert [str(folder / "program.py"), str(target / "own.py")] == sorted(
        user_files(trace), key=lambda file: file.endswith("own.py")
    )
    assert call_site(stack).startswith("own.py:5 ")
    assert call_site(stack[1:2] + stack[3:]).startswith("program.py:8 (<module>) via __init__.py:6")
    with Follower(folder / "out.ctrace") as follower:
        follower.read()
        followed = [follower.stack(index) for index in range(len(trace.stacks))]
    assert [call_site(trace.stack(index)) for index in range(len(trace.stacks))] == [*map(call_site, followed)]
    kinds = {Path(one.file).name: type(one) for one in trace.frames}
    assert {"program.py": Frame, "own.py": Frame, "__init__.py": PackageFrame} == kinds
    assert stack == tuple(Frame(*frame) for frame in stack), "a frame is equal to one of another trace"
