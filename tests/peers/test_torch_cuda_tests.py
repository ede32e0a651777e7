"""The page about PyTorch's tests says what is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_cuda_tests", Path(__file__).with_name("torch_cuda.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_test_of_pytorch_is_asked_or_has_a_reason(peer: ModuleType) -> None:
    asked = {test.key for group in peer.topics().values() for test in group}
    ours, without = set(peer.covered()), peer.absent()
    assert set() == ours - asked, "a Source line names no test of PyTorch's; see tests/data/torch_test_cuda.txt"
    assert set() == without.keys() - asked
    assert set() == ours & without.keys(), "these have a test now; strike them from ABSENT"
    assert set() == asked - ours - without.keys(), "these need a test with a Source line, or a reason in ABSENT"
    assert set(without.values()) <= peer.REASONS.keys()


def test_names_are_not_said_twice(peer: ModuleType) -> None:
    keys = [test.key for group in peer.topics().values() for test in group]
    assert len(keys) == len(set(keys))
    assert sum(len(names.split()) for names in peer.ABSENT.values()) == len(peer.absent())


def test_the_page_is_up_to_date(peer: ModuleType) -> None:
    assert peer.PAGE.read_text() == peer.page(*peer.written()), "run python tests/peers/torch_cuda.py"


def test_sources_are_read_over_lines_and_without_their_file(peer: ModuleType) -> None:
    docstring = """What it is.

    Source: test_torch.py::test_other, test_another
    Source: test_cuda.py::test_one, TestCuda::test_two,
        test_cuda_multigpu.py::test_three
    Source: test_cuda.py::test_four
    test_five
    """
    expected = ["test_cuda.py::test_one", "test_cuda.py::test_two", "test_cuda_multigpu.py::test_three"]
    assert [*expected, "test_cuda.py::test_four"] == peer.sources(docstring)


def test_results_come_from_reports(peer: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("""<testsuites><testsuite>
        <testcase classname="runtime.test_a" name="test_one[x]"/>
        <testcase classname="runtime.test_a" name="test_one[y]"><skipped/></testcase>
        <testcase classname="runtime.test_a" name="test_two"><failure/></testcase>
        <testcase classname="runtime.test_a" name="test_three"><skipped/></testcase></testsuite></testsuites>""")
    ended = peer.outcomes([report])
    assert {"test_a::test_one": "passed", "test_a::test_two": "failed", "test_a::test_three": "skipped"} == ended
    here = "tests/runtime/test_a.py::"
    assert "failed" == peer.result([f"{here}test_one", f"{here}test_two"], ended)
    assert "passed" == peer.result([f"{here}test_one", f"{here}test_three"], ended)
    assert "not run" == peer.result([f"{here}test_four"], ended)
