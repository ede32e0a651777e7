"""The software driver in this process, reached as any program reaches it: through cuda.bindings."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if os.environ.get("CUDATOOL_DEVICE", "sim").startswith("cuda"):
    collect_ignore_glob = ["test_*.py"]  # the process drives a GPU


@pytest.fixture(scope="session")
def machine() -> Any:
    from cudatool import _driver

    choice = _driver.initialize()
    if choice.kind != "sim":
        pytest.skip("this process drives a GPU")
    return choice.machine


@pytest.fixture
def driver(machine: Any) -> Iterator[Any]:
    """cuda.bindings.driver with a context current; nothing may be left in it."""
    from cuda.bindings import driver

    from cudatool.sim.abi import lock
    from cudatool.sim.machine import Context

    gc.collect()  # what earlier tests dropped is not ours
    gc.freeze()  # what is kept, such as parsed kernels, need not be looked through before every test
    assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
    context = ok(driver.cuCtxCreate(None, 0, 0))
    before = len(machine.allocations)
    yield driver
    found = machine.objects.get(int(context))
    assert isinstance(found, Context)
    with lock:
        machine.scheduler.wait_context(found)
    leaked = len(machine.allocations) - before
    ok(driver.cuCtxDestroy(context))
    assert leaked == 0


def ok(result: tuple[Any, ...]) -> Any:
    """Return what a driver call returned, having checked that it succeeded."""
    assert result[0].name == "CUDA_SUCCESS", result
    return result[1] if len(result) == 2 else result[1:]


@pytest.fixture(name="ok")
def ok_fixture() -> Callable[[tuple[Any, ...]], Any]:
    return ok


@pytest.fixture
def streams(driver: Any) -> Iterator[list[Any]]:
    """Two streams that do not wait for the default one."""
    made = [ok(driver.cuStreamCreate(1)) for _ in range(2)]
    yield made
    for stream in made:
        ok(driver.cuStreamDestroy(stream))


@pytest.fixture
def programs(driver: Any) -> Iterator[Any]:
    """Kernels and an empty graph (see graph_programs)."""
    from graph_programs import Programs

    made = Programs(driver, ok)
    yield made
    made.close()


@pytest.fixture(params=["fifo", "lifo", "late", "random"])
def schedule(request: pytest.FixtureRequest, machine: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each schedule in turn."""
    from cudatool.sim import Schedule

    monkeypatch.setattr(machine.scheduler, "schedule", Schedule(request.param))
    name: str = request.param
    return name
