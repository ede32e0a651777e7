"""Public functions in traces."""

from __future__ import annotations

import inspect
import pickle
from importlib import import_module

import pytest

import cudatool
import cudatool.ops
from cudatool.runtime.public_modules import PUBLIC_MODULES
from cudatool.runtime.traced_calls import is_traced, traced

DEFINITIONS = {cudatool.ops.op, cudatool.ops.registered}  # they run when modules are imported, and do no work


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_function_is_traced(module):
    found = import_module(module)
    functions = {name: getattr(found, name) for name in found.__all__ if inspect.isfunction(getattr(found, name))}
    assert [] == [
        name for name, function in functions.items() if not is_traced(function) and function not in DEFINITIONS
    ]


def test_a_call_is_told_under_the_name_that_programs_use(calls):
    cudatool.blas.matmul(cudatool.ones((2, 2)), cudatool.ones((2, 2)))
    assert ["cudatool.ones", "cudatool.ones", "cudatool.blas.matmul"] == [event.name for event in calls]
    assert all(event.aux0 > 0 for event in calls)
    assert "test_runtime_calls" in str(cudatool.trace.stacks.frames(calls[0].stack)[0])


def test_a_call_inside_another_tells_how_deep_it_is(calls):
    @traced
    def outer():
        cudatool.empty(1)

    outer()
    assert [("empty", 1), ("outer", 0)] == [(event.name.rpartition(".")[2], event.aux1) for event in calls]


def test_a_call_that_fails_is_told_too(calls):
    with pytest.raises(cudatool.CudatoolError):
        cudatool.set_device(1000)
    assert ["cudatool.set_device"] == [event.name for event in calls]


def test_public_functions_can_be_pickled():
    assert cudatool.empty is pickle.loads(pickle.dumps(cudatool.empty))
