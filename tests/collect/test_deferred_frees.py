"""What a library has put off freeing is no leak of its program."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudatool.collect import deferred_frees

PROGRAM = """
import numpy as np
from numba import cuda

def step():
    x = cuda.to_device(np.zeros(1000, np.float32))
    return x.copy_to_host()

for _ in range(3):
    step()
"""
LEAK = PROGRAM + "\nfrom cuda.bindings import driver\ndriver.cuMemAlloc(4096)\n"


class _Pending(list[int]):
    """numba's queue of deallocations."""


def _numba(monkeypatch: pytest.MonkeyPatch, *, started: bool) -> tuple[_Pending, _Pending]:
    memory, others = _Pending([1, 2]), _Pending([3])
    context = SimpleNamespace(memory_manager=SimpleNamespace(deallocations=memory), deallocations=others)
    gpus = [SimpleNamespace(primary_context=context), SimpleNamespace(primary_context=None)]
    driver = SimpleNamespace(driver=SimpleNamespace(is_initialized=started))
    monkeypatch.setitem(sys.modules, "numba.cuda.cudadrv.driver", driver)
    monkeypatch.setitem(sys.modules, "numba.cuda.cudadrv.devices", SimpleNamespace(gpus=gpus))
    return memory, others


def test_what_numba_put_off_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, others = _numba(monkeypatch, started=True)
    deferred_frees.carry_out()
    assert not memory and not others


def test_frees_that_fail_are_no_errors_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kernel has faulted, every call of its context fails; the program's own error is what counts."""

    def refuse() -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    memory, others = _numba(monkeypatch, started=True)
    monkeypatch.setattr(memory, "clear", refuse, raising=False)
    deferred_frees.carry_out()
    assert memory and not others


def test_numba_is_left_alone_if_its_driver_was_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, others = _numba(monkeypatch, started=False)
    deferred_frees.carry_out()
    assert memory and others


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
@pytest.mark.parametrize(("program", "kinds"), [(PROGRAM, []), (LEAK, ["leak"])], ids=["out of scope", "lost"])
def test_arrays_of_numba_that_went_out_of_scope_have_not_leaked(tmp_path: Path, program: str, kinds: list[str]) -> None:
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "cudatool", "sanitize", "--checks", "all", "--json", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "CUDATOOL_DEVICE": "sim"},
        capture_output=True,
        text=True,
    )
    assert kinds == [finding["kind"] for finding in json.loads(done.stdout)["on_device"]], done.stderr
    assert done.returncode == bool(kinds)
