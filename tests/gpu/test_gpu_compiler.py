"""Steps of training as traced functions on a GPU: the numbers and the memory of eager steps, or less memory."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatool as ct
from cudatool import blas, ops
from cudatool._driver import gpu_names
from cudatool.compiler import CompiledFunction, compile
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

_SAMPLES = Path(__file__).parents[2] / "samples"
_STEPS = 8

_Step = Callable[[], Any]


def _transformer(wrap: Callable[[Any], Any]) -> tuple[_Step, Any]:
    """Return a step of samples/transformer.py, larger than there, and what `wrap` made of it."""
    spec = importlib.util.spec_from_file_location("transformer_on_gpu", _SAMPLES / "transformer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WIDTH, module.HEADS, module.CONTEXT = 256, 4, 128
    training = module.Training()
    training.load(np.random.default_rng(0))
    step = wrap(training.step)
    return step, step


def _perceptron(wrap: Callable[[Any], Any]) -> tuple[_Step, Any]:
    """Return a step of a perceptron that is given arrays and changes its parameters."""
    rng = np.random.default_rng(0)
    shapes = (256, 1024), (1024,), (1024, 64), (2048, 256), (2048, 64)
    w1, b1, w2, x, y = (ct.asarray((rng.normal(size=shape) / 16).astype(np.float32)) for shape in shapes)

    def step(x: Any, y: Any) -> Any:
        before = blas.mm(x, w1) + b1
        hidden = ops.gelu(before)
        error = (blas.mm(hidden, w2) - y) * (1 / len(x))
        gradient = ops.gelu_backward(blas.mm(error, w2.T), before)
        w2.sub_(blas.mm(hidden.T, error) * 0.1)
        w1.sub_(blas.mm(x.T, gradient) * 0.1)
        b1.sub_(ops.sum(gradient, 0) * 0.1)
        return ops.sum(error * error)

    compiled = wrap(step)
    return lambda: compiled(x, y), compiled


@pytest.fixture
def tf32() -> Iterator[None]:
    before = ct.get_float32_matmul_precision()
    ct.set_float32_matmul_precision("high")
    yield
    ct.set_float32_matmul_precision(before)


def _measured(make: Any, wrap: Callable[[Any], Any]) -> tuple[list[float], int, list[int], Any]:
    """Return losses, bytes of the last steps at their peak, the sizes asked of the allocator, and what was wrapped."""
    gc.collect()
    blas.clear_workspaces()  # or only the first of two would be charged for them
    ct.empty_cache()
    before, given = ct.memory_allocated(), []

    def listen(event: Event) -> None:
        if event.kind is Kind.BLOCK_ALLOC and not event.aux1:
            given.append(event.aux0)

    step, wrapped = make(wrap)
    losses = [float(step().get())]
    hooks.subscribe(listen)
    losses += [float(step().get())]
    hooks.unsubscribe(listen)
    losses += [float(step().get()) for _ in range(_STEPS)]
    ct.synchronize()
    gc.collect()
    ct.reset_peak_memory_stats()
    losses += [float(step().get()) for _ in range(2)]
    return losses, ct.max_memory_allocated() - before, given, wrapped


@pytest.mark.parametrize("make", [_transformer, _perceptron])
def test_a_traced_step_has_the_numbers_of_an_eager_one_in_less_memory(make: Any, tf32: None) -> None:
    wanted, eager_peak, _, _ = _measured(make, lambda step: step)
    losses, peak, given, compiled = _measured(make, lambda step: compile(step, fullgraph=True))
    assert isinstance(compiled, CompiledFunction)
    assert (_STEPS + 2, 2) == (compiled.hits, compiled.misses), compiled.explain()
    # cuBLAS may choose another algorithm for another address, and a step carries the difference on.
    np.testing.assert_allclose(losses, wanted, rtol=2e-3)
    (plan,) = compiled.plans
    assert (plan.peak,) == compiled.peaks
    assert 1 == given.count(plan.peak), "one block of the planned size was asked for"
    assert peak < eager_peak
