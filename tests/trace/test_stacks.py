from __future__ import annotations

import ast
import inspect
import os
import runpy
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import cudatool
import cudatool.cli
import cudatool.viz
from cudatool.trace import stacks
from cudatool.trace.model import Frame


def here() -> Frame:
    frame: FrameType = sys._getframe(1)
    return Frame(__file__, frame.f_code.co_qualname, frame.f_lineno)


def function_in(file: str) -> Callable[[Callable[[], int]], int]:
    """Return a function that calls its argument and whose code says that it is from `file`."""
    namespace: dict[str, Callable[[Callable[[], int]], int]] = {}
    exec(compile("def through(target):\n    return target()\n", file, "exec"), namespace)
    return namespace["through"]


@pytest.mark.parametrize("file", ["half of a pair \ud800.py", "\udcff.py", "x" * 5000, ""])
def test_any_text_may_be_the_name_of_a_file(file: str) -> None:
    assert Frame(file, "through", 2) in stacks.frames(function_in(file)(stacks.capture))


def test_frames_are_innermost_first_with_file_function_and_line() -> None:
    def inner() -> tuple[int, Frame]:
        return stacks.capture(), here()

    (stack, place), caller = inner(), here()
    assert stacks.frames(stack)[:2] == (place, caller)


def test_equal_stacks_have_equal_ids() -> None:
    captured = [stacks.capture() for _ in range(3)]
    assert len(set(captured)) == 1


def test_stacks_from_different_lines_differ() -> None:
    first = stacks.capture()
    second = stacks.capture()
    assert first != second


def test_two_captures_on_one_line_are_the_same_stack() -> None:
    first, second = stacks.capture(), stacks.capture()
    assert first == second


def test_code_compiled_again_gives_the_same_stack() -> None:
    captured = {function_in("<generated>")(stacks.capture) for _ in range(50)}
    assert len(captured) == 1


def test_skip_leaves_out_the_innermost_frames() -> None:
    def inner() -> int:
        return stacks.capture(1)

    stack, caller = inner(), here()
    assert stacks.frames(stack)[0] == caller


@pytest.mark.parametrize("package", [cudatool, cudatool.viz])
def test_cudatools_own_frames_are_left_out(package: object) -> None:
    path = os.path.join(os.path.dirname(package.__file__), "somewhere.py")  # type: ignore[attr-defined]
    stack, caller = function_in(path)(stacks.capture), here()
    assert stacks.frames(stack)[0] == caller


def test_stack_ends_where_the_command_line_started_the_program() -> None:
    launcher = function_in(os.path.join(os.path.dirname(cudatool.cli.__file__), "run.py"))
    program = function_in("program.py")
    stack = launcher(lambda: program(stacks.capture))
    assert [frame.file for frame in stacks.frames(stack)] == ["program.py", __file__]


def test_stack_ends_where_pytest_or_unittest_called_the_test() -> None:
    for caller in (pytest.Item.runtest, unittest.TestCase.run):
        launcher = function_in(inspect.getfile(caller))
        program = function_in("program.py")
        stack = launcher(lambda: program(stacks.capture))  # noqa: B023 - called at once
        assert [frame.file for frame in stacks.frames(stack)] == ["program.py", __file__]


_WORK = """
import sys
from cudatool.trace import stacks

def work(send):
    send.send([(frame.file.rpartition("/")[2], frame.function) for frame in stacks.frames(stacks.capture())])

if __name__ == "__main__":
    from multiprocessing import get_context
    context = get_context(sys.argv[1])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(send,))
    process.start()
    print(receive.recv())
    process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_stack_ends_where_multiprocessing_started_a_process(method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_WORK)
    done = subprocess.run(
        [sys.executable, "program.py", method], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    inner, *others = ast.literal_eval(done.stdout)
    assert inner == ("program.py", "work")
    assert {file for file, _ in others} == {"process.py"}  # of multiprocessing; no <string> is the user's own


def test_where_stacks_end_is_found_without_importing_unittest(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.path.realpath(inspect.getfile(unittest.TestCase))
    for name in ("unittest", "unittest.case"):
        monkeypatch.delitem(sys.modules, name)
    callers, _ = stacks._others.__wrapped__()
    assert file in callers
    assert "unittest" not in sys.modules


def test_frames_of_numpy_are_left_out() -> None:
    caller = here()
    stack = int(np.apply_along_axis(lambda _: stacks.capture(), 0, np.zeros(1)))
    assert [(caller.file, caller.line + 1)] * 2 == [(frame.file, frame.line) for frame in stacks.frames(stack)]


def test_a_directory_whose_name_starts_like_ours_is_not_ours() -> None:
    path = os.path.dirname(cudatool.__file__) + "_users/model.py"
    assert stacks.frames(function_in(path)(stacks.capture))[0].file == path


def test_frames_of_runpy_and_of_the_import_system_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stacks_probe.py").write_text("from cudatool.trace import stacks\nstack = stacks.capture()\n")
    monkeypatch.syspath_prepend(tmp_path)
    stack = runpy.run_path(str(tmp_path / "stacks_probe.py"))["stack"]
    import stacks_probe  # type: ignore[import-not-found]

    files = {frame.file for number in (stack, stacks_probe.stack) for frame in stacks.frames(number)}
    assert str(tmp_path / "stacks_probe.py") in files
    assert not [file for file in files if file.startswith("<frozen")]


def test_frames_of_contextlib_are_left_out() -> None:
    @contextmanager
    def context() -> Iterator[int]:
        yield stacks.capture()

    with context() as stack:
        names = [frame.function.rpartition(".")[2] for frame in stacks.frames(stack)]
    assert ["context", "test_frames_of_contextlib_are_left_out"] == names[:2]


def test_disabled_capture_returns_the_empty_stack() -> None:
    stacks.enable(False)
    assert stacks.capture() == 0
    assert stacks.frames(0) == ()


def test_runaway_recursion_keeps_the_innermost_frames() -> None:
    def descend(depth: int) -> int:
        return descend(depth - 1) if depth else stacks.capture()

    captured = stacks.frames(descend(400))
    assert len(captured) == 256
    assert {frame.function.rpartition(".")[2] for frame in captured} == {"descend"}
    assert descend(401) == descend(402)


def test_unknown_id_is_refused() -> None:
    with pytest.raises(KeyError):
        stacks.frames(10**9)


def test_frames_below_a_hidden_directory_are_left_out(tmp_path: Path) -> None:
    hidden, beside = function_in(str(tmp_path / "framework" / "a.py")), function_in(str(tmp_path / "framework2.py"))
    stacks.hide(str(tmp_path / "framework"))
    shown = [frame.file for frame in stacks.frames(hidden(lambda: beside(stacks.capture)))]
    assert shown[:3] == [str(tmp_path / "framework2.py"), __file__, __file__]


def test_a_library_of_machine_code_below_a_hidden_directory_is_kept(tmp_path: Path) -> None:
    stacks.hide(str(tmp_path / "framework"))
    library = Frame(str(tmp_path / "framework" / "lib" / "libframework.so"), "libframework.so", 0)
    inside, program = Frame(str(tmp_path / "framework" / "a.py"), "pin", 3), Frame("/home/me/train.py", "load", 7)
    assert (library, program) == stacks.frames(stacks.intern([library, inside, program]))
