"""Which frame of a stack a user is to look at, and how it is written."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cudatool.trace.frames import (
    MissingStack,
    call_site,
    call_sites,
    cell_name,
    frame_words,
    is_generated,
    missing_stack,
    user_frame,
)
from cudatool.trace.model import Frame, Trace

MINE = Frame("/home/me/my_torch/run.py", "main", 7)
LIBRARY = Frame("/venv/lib/python3.12/site-packages/other/core.py", "helper", 3)


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/my_torch/run.py",
        "/home/me/torch/run.py",
        "/home/me/torch_utils/models.py",
        "C:\\Users\\me\\torch_things\\run.py",
        "/home/me/pytorch/examples/train.py",
        "/home/me/lib/python/train.py",
        "<stdin>",
    ],
)
def test_a_file_of_the_users_is_the_users_own_whatever_its_folder(file: str) -> None:
    mine = Frame(file, "main", 7)
    assert mine == user_frame((LIBRARY, mine))


@pytest.mark.parametrize(
    "file",
    [
        "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.11/threading.py",
        "C:\\venv\\Lib\\site-packages\\torch\\nn\\functional.py",
        "/opt/pytorch/torch/nn/modules/linear.py",
        "torch/nn/modules/linear.py",
        "<frozen importlib._bootstrap>",
        "/build/torch/csrc/autograd/engine.cpp",
        "at/native/add.cu",
    ],
)
def test_what_is_installed_or_native_is_not_the_users_own(file: str) -> None:
    assert MINE == user_frame((Frame(file, "call", 7), MINE))


def test_call_sites_that_would_read_alike_name_the_callers_that_differ() -> None:
    resize = Frame("", "at::native::(anonymous namespace)::resize(c10::IntArrayRef)", 0)
    stacks = [(resize, Frame("", f"at::native::{name}(at::Tensor const&)", 0)) for name in ("relu", "add", "mul")]
    assert ["at::native::resize, from at::native::" + name for name in ("relu", "add", "mul")] == call_sites(stacks)
    work = Frame("/home/me/train.py", "work", 3)
    called = [(work, Frame("/home/me/train.py", "main", line)) for line in (10, 20)]
    assert ["train.py:3 (work), from train.py:10 (main)", "train.py:3 (work), from train.py:20 (main)"] == call_sites(
        called
    )


def test_functions_within_functions_are_named_without_those_around_them() -> None:
    nested = Frame("/env/lib/python3.11/site-packages/numba/driver.py", "Driver._wrap.<locals>.safe_call", 324)
    own = Frame("/home/me/train.py", "Trainer.step", 9)
    assert "train.py:9 (Trainer.step) via driver.py:324 (safe_call)" == call_site([nested, own])


def test_what_allocates_an_operators_result_is_not_its_call_site() -> None:
    create = Frame("RegisterCUDA.cpp", "at::(anonymous namespace)::create_out(c10::IntArrayRef)", 40)
    assert "at::native::relu" == call_site((create, Frame("", "at::native::relu(at::Tensor const&)", 0)))


def test_call_sites_of_folders_that_differ_are_numbered() -> None:
    stacks = [(Frame(f"/home/{name}/train.py", "work", 3),) for name in ("me", "you")]
    assert ["train.py:3 (work) #1", "train.py:3 (work) #2"] == call_sites(stacks)


def test_equal_stacks_read_alike_and_an_empty_one_is_empty() -> None:
    assert ["run.py:7 (main)", "", "run.py:7 (main)", ""] == call_sites([(MINE,), (), (MINE,), ()])
    assert "" == call_site(())


@pytest.mark.parametrize(
    ("header", "stacks", "before", "why"),
    [
        ({"stacks": False}, [()], True, MissingStack.TURNED_OFF),
        ({"stacks": True}, [(), (0,)], True, MissingStack.BEFORE),
        ({"history_kept": 0.1}, [(), (0,)], True, MissingStack.HISTORY_OFF),
        ({}, [()], False, MissingStack.NOT_KEPT),
        ({}, [(), (0,)], False, MissingStack.NO_FRAMES),
    ],
)
def test_a_missing_stack_has_a_reason(header: dict, stacks: list, before: bool, why: MissingStack) -> None:
    import numpy as np

    from cudatool.trace.events import RECORD

    made = Trace(np.zeros(0, RECORD), stacks=stacks, frames=[MINE], header=header)
    assert why == missing_stack(made, before=before)
    assert why.text.startswith("(no stack")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/tmp/torchinductor_me/4e/c4earadmtcvpvd3qmifkjlcwr5vb2sqnjr5b72wkl5gxswmzptgg.py", True),
        ("C:\\cache\\4e\\c4earadmtcvpvd3qmifkjlcwr5vb2sqnjr5b72wkl5gxswmzptgg.py", True),
        ("/tmp/torchinductor_me/4f/c4earadmtcvpvd3qmifkjlcwr5vb2sqnjr5b72wkl5gxswmzptgg.py", False),
        ("/home/me/ab/cab.py", False),
    ],
)
def test_files_of_pytorchs_compiler_are_told_by_their_names(file: str, expected: bool) -> None:
    assert is_generated(file) is expected
    user = Frame("/home/me/train.py", "step", 40)
    words = "train.py:40 (step) via c4earadm...py:7 (call)" if expected else f"{frame_words(Frame(file, 'call', 7))}"
    assert call_site((Frame(file, "call", 7), user)) == words


def test_a_notebooks_cell_has_the_name_that_tracebacks_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/tmp/ipykernel_7/123.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert ["In[3]", "/home/train.py"] == [cell_name(file) for file in ("/tmp/ipykernel_7/123.py", "/home/train.py")]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported, not running
    assert "/tmp/ipykernel_7/123.py" == cell_name("/tmp/ipykernel_7/123.py")
