"""PyTorch's tests of automatic mixed precision, asked of our arrays: gradients are passed, not differentiated."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import amp, blas, ops, optim
from cudatool.errors import UsageError
from cudatool.graphs import CUDAGraph, graph

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OPTIMIZERS = {
    "SGD": lambda params, **options: optim.SGD(params, momentum=0.9, **options),
    "Adam": optim.Adam,
    "AdamW": lambda params, **options: optim.AdamW(params, amsgrad=True, **options),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2)


def array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Return an array on the device with elements between 0.5 and 1.5."""
    return cudatool.asarray((rng.random(shape) + 0.5).astype(dtype))


def function(name: str) -> Any:
    package, _, member = name.rpartition(".")
    return getattr(importlib.import_module(f"cudatool.{package}"), member)


def cast(value: cudatool.DeviceArray, dtype: Any) -> cudatool.DeviceArray:
    """Return an array of floating-point numbers in another dtype, by way of the host."""
    return value if value.dtype.kind == "i" else cudatool.asarray(value.get().astype(dtype))


def check(name: str, args: list[Any], run_as: Any, expected: Any, dtype: Any = np.float16, **kwargs: Any) -> None:
    """Check that autocast runs an operation as if its arguments had been cast by hand."""
    with amp.autocast(dtype=dtype):
        found = function(name)(*args, **kwargs)
        with amp.autocast(enabled=False):
            control = function(name)(*[cast(arg, run_as) for arg in args], **kwargs)
    assert np.dtype(expected) == found.dtype
    # Sums may be in another order, which depends on the input's dtype.
    np.testing.assert_allclose(found.get(), control.get().astype(expected), rtol=1e-6)


PRODUCTS = {
    "blas.mm": [(4, 8), (8, 3)],
    "blas.bmm": [(2, 4, 8), (2, 8, 3)],
    "blas.matmul": [(2, 4, 8), (8, 3)],
    "blas.mv": [(4, 8), (8,)],
    "blas.addmm": [(4, 3), (4, 8), (8, 3)],
    "blas.baddbmm": [(2, 4, 3), (2, 4, 8), (2, 8, 3)],
    "blas.addmv": [(4,), (4, 8), (8,)],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_in_float16(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_autocast_torch_fp16, test_autocast_linalg_fp16"""
    check(name, [array(rng, shape) for shape in PRODUCTS[name]], np.float16, np.float16)


@pytest.mark.parametrize("name", ["blas.mm", "blas.addmm"])
def test_products_run_in_bfloat16(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_autocast_torch_bf16"""
    check(name, [array(rng, shape) for shape in PRODUCTS[name]], BFLOAT16, BFLOAT16, BFLOAT16)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=["float16", "bfloat16"])
def test_linear_layers_run_in_lower_precision(rng: np.random.Generator, dtype: Any) -> None:
    """Source: test_cuda.py::test_autocast_nn_fp16, test_autocast_nn_bf16"""
    check("blas.linear", [array(rng, (4, 8)), array(rng, (3, 8)), array(rng, (3,))], dtype, dtype, dtype)


def test_the_product_operator_runs_in_float16(rng: np.random.Generator) -> None:
    """Source: test_cuda.py::test_autocast_methods_fp16"""
    with amp.autocast():
        assert np.float16 == (array(rng, (4, 8)) @ array(rng, (8, 3))).dtype


@pytest.mark.parametrize("name", ["exp", "log", "reciprocal", "softplus"])
def test_functions_of_wide_range_run_in_float32(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_autocast_torch_fp32"""
    check(f"ops.{name}", [array(rng, (5,), np.float16)], np.float32, np.float32)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sum", {}),
        ("prod", {}),
        ("norm", {}),
        ("softmax", {"dim": -1}),
        ("log_softmax", {"dim": -1}),
        ("logsumexp", {"dim": -1}),
        ("layer_norm", {"normalized_shape": (6,)}),
    ],
)
def test_what_sums_runs_in_float32(rng: np.random.Generator, name: str, options: dict[str, Any]) -> None:
    """Source: test_cuda.py::test_autocast_torch_fp32, test_autocast_nn_fp32"""
    check(f"ops.{name}", [array(rng, (5, 6), np.float16)], np.float32, np.float32, **options)


def test_losses_run_in_float32(rng: np.random.Generator) -> None:
    """Source: test_cuda.py::test_autocast_nn_fp32"""
    target = cudatool.asarray(np.array([0, 3, 5]))
    check("ops.cross_entropy", [array(rng, (3, 6), np.float16), target], np.float32, np.float32)


def test_the_power_operator_runs_in_float32(rng: np.random.Generator) -> None:
    """Source: test_cuda.py::test_autocast_methods_fp32"""
    with amp.autocast():
        assert np.float32 == (array(rng, (4,), np.float16) ** 1.5).dtype


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [((np.float16,) * 3, np.float16), ((np.float16, np.float32, np.float16), np.float32)],
)
@pytest.mark.parametrize("name", ["ops.addcmul", "ops.addcdiv", "ops.atan2", "blas.dot"])
def test_what_needs_one_dtype_runs_in_the_widest(
    rng: np.random.Generator, name: str, dtypes: Any, expected: Any
) -> None:
    """Source: test_cuda.py::test_autocast_torch_need_autocast_promote"""
    count = 3 if "addc" in name else 2
    check(name, [array(rng, (5,), dtype) for dtype in dtypes[:count]], expected, expected)


@pytest.mark.parametrize("name", ["add", "mul", "sub", "div", "maximum", "lerp"])
def test_what_promotes_by_itself_is_left_alone(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_autocast_torch_expect_builtin_promote"""
    args = [array(rng, (5,), dtype) for dtype in (np.float32, np.float16, np.float16)][: 3 if name == "lerp" else 2]
    check(f"ops.{name}", args, np.float32, np.float32)


@pytest.mark.parametrize("name", ["eq", "ge", "lt"])
def test_comparisons_are_left_alone(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_autocast_torch_expect_builtin_promote"""
    check(f"ops.{name}", [array(rng, (5,)), array(rng, (5,), np.float16)], np.float32, np.bool)


@pytest.mark.parametrize("name", ["cat", "stack"])
def test_joined_arrays_have_the_widest_type(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_autocast_torch_expect_builtin_promote"""
    with amp.autocast():
        assert np.float32 == function(f"ops.{name}")([array(rng, (5,)), array(rng, (5,), np.float16)]).dtype


def test_operators_are_left_alone(rng: np.random.Generator) -> None:
    """Source: test_cuda.py::test_autocast_methods_expect_builtin_promote"""
    wide, narrow = array(rng, (5,)), array(rng, (5,), np.float16)
    with amp.autocast():
        assert [np.float32] * 3 == [(wide + narrow).dtype, (narrow * wide).dtype, (wide - narrow).dtype]
        assert np.bool == (wide == narrow).dtype


@pytest.mark.parametrize("ignored", [np.float64, np.int32])
def test_float64_and_integers_are_ignored(rng: np.random.Generator, ignored: Any) -> None:
    """Source: test_cuda.py::test_autocast_ignored_types"""
    a, b = array(rng, (8, 8), ignored), array(rng, (8, 8), ignored)
    with amp.autocast():
        if ignored is np.float64:
            with pytest.raises(UsageError, match="float64"):
                blas.mm(a, array(rng, (8, 8), np.float16))
            assert np.float64 == blas.mm(a, b).dtype
            assert np.float64 == ops.norm(a).dtype
            assert np.float64 == ops.addcmul(a, b, b).dtype
        found = ops.pow(a, b).dtype, ops.sum(a).dtype
        with amp.autocast(enabled=False):
            assert found == (ops.pow(a, b).dtype, ops.sum(a).dtype)


def test_parameters_are_cast_once(rng: np.random.Generator) -> None:
    """Source: test_cuda.py::test_autocast_cache_leak"""
    weight, data = array(rng, (10, 10)), array(rng, (1, 10))
    optimizer = optim.SGD([weight])
    with amp.autocast():
        out = blas.linear(data, weight)
        first = cudatool.memory_allocated()
        for _ in range(3):
            out = blas.linear(data, weight)
            assert first == cudatool.memory_allocated()
    assert out.shape == (1, 10)
    del optimizer


# GradScaler.


def steps_of(rng: np.random.Generator, params: list[Any], count: int) -> list[list[Any]]:
    return [[rng.normal(size=param.shape).astype(np.float32) for param in params] for _ in range(count)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_step_is_a_step(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_graph_optims"""
    host = [rng.normal(size=(size, size)).astype(np.float32) for size in (5, 6)]
    eager, graphed = ([cudatool.asarray(param) for param in host] for _ in range(2))
    control, optimizer = OPTIMIZERS[name](eager, lr=0.1), OPTIMIZERS[name](graphed, lr=0.1)
    steps = steps_of(rng, host, 5)
    static = [cudatool.zeros(param.shape) for param in host]
    captured = CUDAGraph()
    for count, grads in enumerate(steps):
        control.step([cudatool.asarray(grad) for grad in grads])
        for buffer, grad in zip(static, grads, strict=True):
            buffer.copy_(grad)
        if count < 2:
            optimizer.step(static)
            continue
        if count == 2:
            cudatool.synchronize()
            with graph(captured):
                optimizer.step(static)
        captured.replay()
    for ours, theirs in zip(graphed, eager, strict=True):
        np.testing.assert_array_equal(ours.get(), theirs.get())


def test_a_first_step_can_be_captured_in_groups() -> None:
    """Source: test_cuda.py::test_graph_optims_with_explicitly_capturable_param_groups"""
    eager, graphed = ([cudatool.ones(1), cudatool.ones(1)] for _ in range(2))
    control, optimizer = (
        optim.AdamW([{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}])
        for params in (eager, graphed)
    )
    grads, captured = [cudatool.ones(1), cudatool.full(1, 2.0)], CUDAGraph()
    cudatool.synchronize()
    with graph(captured):
        optimizer.step(grads)
    for _ in range(3):
        captured.replay()
        control.step(grads)
    assert [param.get().tolist() for param in eager] == [param.get().tolist() for param in graphed]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_scaled_step_is_skipped_at_infinity(rng: np.random.Generator, name: str) -> None:
    """Source: test_cuda.py::test_graph_scaling_fused_optimizers"""
    host = [rng.normal(size=(5, 5)).astype(np.float32)]
    eager, graphed = ([cudatool.asarray(param) for param in host] for _ in range(2))
    control, optimizer = OPTIMIZERS[name](eager, lr=0.1), OPTIMIZERS[name](graphed, lr=0.1)
    scalers = [amp.GradScaler(init_scale=4.0, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(cudatool.ones(()))
    static, captured = [cudatool.zeros((5, 5))], CUDAGraph()

    def step(scaler: amp.GradScaler, stepped: Any, grads: list[Any]) -> None:
        scaler.step(stepped, grads)
        scaler.update()

    cudatool.synchronize()
    with graph(captured):
        step(scalers[1], optimizer, static)
    steps = steps_of(rng, host, 5)
    steps[2][0][0, 0] = np.inf
    for grads in steps:
        step(scalers[0], control, [cudatool.asarray(grad) for grad in grads])
        static[0].copy_(grads[0])
        captured.replay()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        np.testing.assert_array_equal(graphed[0].get(), eager[0].get())


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_training_is_training(rng: np.random.Generator, name: str, separate: bool) -> None:
    """Source: test_cuda.py::test_grad_scaling_autocast_fused_optimizers"""
    host = [rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2)]
    control_params, params = ([cudatool.asarray(param) for param in host] for _ in range(2))
    control, optimizer = OPTIMIZERS[name](control_params, lr=0.1), OPTIMIZERS[name](params, lr=0.1)
    scaler = amp.GradScaler(init_scale=128.0, growth_interval=1)
    scaler.scale(cudatool.ones(()))
    for step, grads in enumerate(steps_of(rng, host, 4)):
        bad = step == 1
        given = [scaler.scale(cudatool.asarray(grad)) for grad in grads]
        if bad:
            given[0][0, 0] = np.inf
        else:
            control.step([cudatool.asarray(grad) for grad in grads])
        if separate:
            scaler.unscale_(optimizer, given)
        scaler.step(optimizer, given)
        scaler.update()
    assert 128.0 * 2 * 0.5 * 2 * 2 == scaler.get_scale()
    for ours, theirs in zip(params, control_params, strict=True):
        np.testing.assert_allclose(ours.get(), theirs.get(), rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scale_set_by_the_program_counts_too(name: str) -> None:
    """Source: test_cuda.py::test_grad_scaler_with_preset_grad_scale"""
    weight, grad = cudatool.ones((5, 5)), cudatool.full((5, 5), 15.0)
    optimizer, scaler = OPTIMIZERS[name]([weight], lr=0.1), amp.GradScaler(init_scale=5.0)
    scaler.scale(cudatool.ones(5))
    optimizer.grad_scale = cudatool.full(1, 3.0)
    scaler.step(optimizer, [grad])
    np.testing.assert_array_equal(grad.get(), np.ones((5, 5)))


def test_the_scale_follows_gradients_of_a_graph() -> None:
    """Source: test_cuda.py::test_graph_grad_scaling"""
    scaler, captured = amp.GradScaler(init_scale=4.0), CUDAGraph()
    weight = cudatool.ones(100)
    optimizer = optim.SGD([weight], lr=0.1)
    data, grad = cudatool.ones(100, np.float16), cudatool.zeros(100)
    scaler.scale(cudatool.ones(()))
    cudatool.synchronize()
    with graph(captured):  # the gradient of the sum of weight * data, by way of float16
        optim.foreach_copy_([grad], [scaler.scale(data)])
    rows = [(5, 4, 1, 20.0), (20000, 2, 0, np.inf), (5, 2, 1, 10.0), (40000, 1, 0, np.inf)]
    for value, scale, count, expected in rows:
        data.fill_(value)
        captured.replay()
        assert {expected} == {*grad.get().tolist()}
        scaler.step(optimizer, [grad])
        scaler.update()
        state = scaler.state_dict()
        assert (scale, count) == (state["scale"], state["_growth_tracker"])


@pytest.mark.usefixtures("second")
def test_each_output_is_scaled_on_its_device() -> None:
    """Source: test_cuda_multigpu.py::test_grad_scaling_scale"""
    scaler = amp.GradScaler(init_scale=2.0)
    first, second = cudatool.full(1, 4.0, device=0), cudatool.full(1, 4.0, device=1)
    found = scaler.scale([first, (second, [first])])
    assert (0, 1, 0) == (found[0].device, found[1][0].device, found[1][1][0].device)
    assert [8.0] * 3 == [float(each.get()[0]) for each in (found[0], found[1][0], found[1][1][0])]


@pytest.mark.usefixtures("second")
def test_an_infinity_on_one_of_two_devices_skips_the_step_on_both() -> None:
    """Source: test_cuda_multigpu.py::test_grad_scaling_multigpu"""
    params = [cudatool.ones(3, device=device) for device in (0, 1)]
    optimizer, scaler = optim.Adam(params, lr=0.1), amp.GradScaler(init_scale=4.0, growth_interval=1)
    scaler.scale(cudatool.ones((), device=0))
    for value in (np.inf, 8.0):
        scaler.step(optimizer, [cudatool.full(3, 8.0, device=0), cudatool.full(3, value, device=1)])
        scaler.update()
        skipped = value == np.inf
        assert [skipped] * 2 == [bool(np.all(param.get() == 1)) for param in params]
        assert (2.0 if skipped else 4.0) == scaler.get_scale()
