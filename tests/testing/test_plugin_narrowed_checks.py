"""Checks that are on for the process and narrowed for a while."""

from __future__ import annotations

import json

import pytest

import cudatool as ct
from cudatool import _driver
from cudatool.recording import drain, narrow, sources
from cudatool.trace import Event, Kind, hooks

SOURCE = 'extern "C" __global__ void same(float *x) { x[0] = threadIdx.x; x[1] = x[0]; }'


def test_only_what_a_test_asks_for_is_compiled_into_its_kernels() -> None:
    if _driver.initialize().kind != "sim":
        pytest.skip("only the software device has checkers")
    found: list[str] = []

    def keep(event: Event) -> None:
        if event.kind is Kind.FINDING:
            found.append(json.loads(event.name)["check"])

    kernel = ct.compile(SOURCE, "same")
    runs = []
    # Of segments that were there before, no checker knows who owns which part; a pool has its own.
    with sources(checks=["memcheck", "racecheck", "initcheck"]), ct.use_mem_pool(ct.MemPool()):
        hooks.subscribe(keep)
        x = ct.zeros(1)  # and so x[1] is beyond its end
        for checks in (["memcheck"], ["racecheck"], [], ["memcheck", "racecheck"]):
            narrow(checks)
            kernel[1, 32](x)
            drain()
            runs.append(set(found))
            found.clear()
        y = ct.empty(2)
        narrow([])
        ct.compile(SOURCE, "same")[1, 1](y)  # writes, seen although it is not checked
        narrow(["initcheck"])
        y.clone()
        kernel[1, 1](y)
        drain()
        hooks.unsubscribe(keep)
    assert [{"memcheck"}, {"racecheck"}, set(), {"memcheck", "racecheck"}] == runs
    assert [] == found
