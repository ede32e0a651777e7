"""Fused optimizers and work on lists of arrays, against the published formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from warm_process import COMMAND_LINE, run_python

import cudatool
from cudatool import optim
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.runtime.multi_tensor import CHUNK, plan
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Event, Kind

Arrays = list[Any]
SHAPES = [(3, 5), (64,), (), (0, 4), (7, 3, 2)]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Results in these dtypes are right to about the last two of their bits, after some steps.
TOLERANCE = {"float32": 2e-6, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(rng: np.random.Generator, shapes: list[Any] = SHAPES, dtype: Any = np.float32) -> Arrays:
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def on_device(arrays: Arrays) -> Arrays:
    return [cudatool.asarray(array) for array in arrays]


def zeros_like(arrays: Arrays) -> Arrays:
    return [np.zeros_like(array) for array in arrays]


def assert_close(found: Arrays, expected: Arrays, tolerance: float | None = None) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        bound = TOLERANCE[ours.dtype.name] if tolerance is None else tolerance
        np.testing.assert_allclose(ours.get().astype(np.float64), theirs, rtol=bound, atol=bound)


class AdamFormula:
    """Adam as Kingma and Ba wrote it (algorithm 1), with AMSGrad (Reddi et al.) and AdamW's decay, in float64."""

    def __init__(self, params: Arrays, **options: Any) -> None:
        self.params = [param.astype(np.float64) for param in params]
        self.m, self.v, self.largest = (zeros_like(self.params) for _ in range(3))
        self.t = 0
        self.options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | options

    def step(self, grads: Arrays) -> None:
        o = self.options
        beta1, beta2 = o["betas"]
        self.t += 1
        for i, grad in enumerate(grads):
            g = -grad.astype(np.float64) if o.get("maximize") else grad.astype(np.float64)
            if o.get("decoupled"):
                self.params[i] = self.params[i] * (1 - o["lr"] * o["weight_decay"])
            else:
                g = g + o["weight_decay"] * self.params[i]
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
            self.largest[i] = np.maximum(self.largest[i], self.v[i])
            v = self.largest[i] if o.get("amsgrad") else self.v[i]
            m_hat, v_hat = self.m[i] / (1 - beta1**self.t), v / (1 - beta2**self.t)
            self.params[i] = self.params[i] - o["lr"] * m_hat / (np.sqrt(v_hat) + o["eps"])


class SgdFormula:
    """SGD with momentum as torch.optim.SGD's documentation has it, in float64."""

    def __init__(self, params: Arrays, **options: Any) -> None:
        self.params = [param.astype(np.float64) for param in params]
        self.buffers: list[Any] = [None] * len(params)
        self.options = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0} | options

    def step(self, grads: Arrays) -> None:
        o = self.options
        for i, grad in enumerate(grads):
            g = -grad.astype(np.float64) if o.get("maximize") else grad.astype(np.float64)
            g = g + o["weight_decay"] * self.params[i]
            if o["momentum"]:
                first = self.buffers[i] is None
                self.buffers[i] = g if first else o["momentum"] * self.buffers[i] + (1 - o["dampening"]) * g
                g = g + o["momentum"] * self.buffers[i] if o.get("nesterov") else self.buffers[i]
            self.params[i] = self.params[i] - o["lr"] * g


ADAM_OPTIONS = [
    {},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True},
]


@pytest.mark.parametrize("options", ADAM_OPTIONS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_after_a_hundred_steps(rng: np.random.Generator, decoupled: bool, options: dict[str, Any]) -> None:
    host = normal(rng)
    params = on_device(host)
    optimizer = (optim.AdamW if decoupled else optim.Adam)(params, **{"weight_decay": 0.0, **options})
    formula = AdamFormula(host, decoupled=decoupled, **options)
    for _ in range(100):
        grads = normal(rng)
        optimizer.step(on_device(grads))
        formula.step(grads)
    assert_close(params, formula.params, 2e-5)  # a hundred roundings
    assert_close([state["exp_avg"] for state in optimizer.state], formula.m)
    assert_close([state["exp_avg_sq"] for state in optimizer.state], formula.v)
    assert {100.0} == {float(state["step"].get()) for state in optimizer.state}


@pytest.mark.parametrize("dtype", [np.float64, np.float16, BFLOAT16])
def test_adam_in_other_precisions(rng: np.random.Generator, dtype: Any) -> None:
    host = normal(rng, dtype=dtype)
    params = on_device(host)
    optimizer, formula = optim.Adam(params, lr=0.01), AdamFormula(host, lr=0.01)
    for _ in range(3):
        grads = normal(rng, dtype=dtype)
        optimizer.step(on_device(grads))
        formula.step(grads)
    assert_close(params, formula.params)
    assert {np.dtype(dtype)} == {state["exp_avg"].dtype for state in optimizer.state}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.8, "nesterov": True, "maximize": True, "weight_decay": 0.2},
    ],
)
def test_sgd_after_some_steps(rng: np.random.Generator, options: dict[str, Any]) -> None:
    host = normal(rng)
    params = on_device(host)
    optimizer, formula = optim.SGD(params, lr=0.05, **options), SgdFormula(host, lr=0.05, **options)
    for _ in range(10):
        grads = normal(rng)
        optimizer.step(on_device(grads))
        formula.step(grads)
    assert_close(params, formula.params)


@pytest.mark.parametrize("make", [optim.Adam, lambda *a, **k: optim.SGD(*a, momentum=0.9, **k)])
def test_master_weights_keep_what_half_precision_would_round_away(make: Any) -> None:
    """A thousandth of 1 is less than half a unit in bfloat16's last place, so plain steps of it would get nowhere."""
    param = cudatool.ones(5, BFLOAT16)
    optimizer = make([param], lr=1e-3, master_weights=True)
    for _ in range(20):
        optimizer.step([cudatool.ones(5, BFLOAT16)])
    master = optimizer.state[0]["master_param"]
    assert np.float32 == master.dtype
    assert np.all(master.get() < 0.99)
    np.testing.assert_array_equal(param.get(), master.get().astype(BFLOAT16))


def test_parameters_of_several_dtypes_and_without_gradient(rng: np.random.Generator) -> None:
    host = [rng.normal(size=5).astype(dtype) for dtype in ("f4", "f8", "f4", "f2")]
    grads = [rng.normal(size=5).astype(array.dtype) for array in host]
    params = on_device(host)
    optimizer = optim.Adam(params, lr=0.1)
    given: Arrays = on_device(grads)
    given[2] = None
    optimizer.step(given)
    formula = AdamFormula(host, lr=0.1)
    formula.step(grads)
    formula.params[2] = host[2].astype(np.float64)
    assert_close(params, formula.params)
    assert [1, 1, 0, 1] == [float(state["step"].get()) for state in optimizer.state]


def test_groups_have_their_own_options() -> None:
    fast, slow = cudatool.zeros(3), cudatool.zeros(3)
    optimizer = optim.SGD([{"params": fast, "lr": 1.0}, {"params": [slow]}], lr=0.25)
    optimizer.step([cudatool.ones(3), cudatool.ones(3)])
    assert ([-1] * 3, [-0.25] * 3) == (fast.get().tolist(), slow.get().tolist())
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step([None, cudatool.ones(3)])
    assert ([-1] * 3, [-0.75] * 3) == (fast.get().tolist(), slow.get().tolist())


@pytest.mark.parametrize(
    "sizes", [[CHUNK - 1, CHUNK, CHUNK + 1, 1], [1 + i % 3 for i in range(130)]], ids=["around a chunk", "many"]
)
def test_every_element_is_stepped_once(rng: np.random.Generator, sizes: list[int]) -> None:
    host, grads = normal(rng, sizes), normal(rng, sizes)  # type: ignore[arg-type]
    params = on_device(host)
    optim.fused_sgd_(
        params,
        on_device(grads),
        [],
        weight_decay=0,
        momentum=0,
        lr=0.5,
        dampening=0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    for found, param, grad in zip(params, host, grads, strict=True):
        np.testing.assert_array_equal(found.get(), param - np.float32(0.5) * grad)


@settings(max_examples=examples(25), deadline=None)
@given(sizes=st.lists(st.integers(1, 8 * CHUNK), min_size=1, max_size=60), lists=st.integers(1, 7))
def test_every_chunk_is_in_one_launch_and_tables_fit(sizes: list[int], lists: int) -> None:
    found = []
    for first, last, blocks, table in plan(tuple(sizes), lists):
        assert table.nbytes <= 4096 - 88
        assert table["first_block"] == len(found)
        assert table["sizes"][: last - first].tolist() == sizes[first:last]
        found += [(first + int(table["array"][b]), int(table["chunk"][b])) for b in range(blocks)]
    assert found == [(array, chunk) for array, size in enumerate(sizes) for chunk in range(math.ceil(size / CHUNK))]


def test_arrays_at_odd_addresses_are_stepped(rng: np.random.Generator) -> None:
    host = rng.normal(size=9).astype(np.float32)
    whole = cudatool.asarray(host)
    optim.foreach_scale_([whole[1:]], 2.0)
    np.testing.assert_array_equal(whole.get(), host * np.float32([1, 2, 2, 2, 2, 2, 2, 2, 2]))


def test_arrays_in_another_order_of_dimensions_are_stepped(rng: np.random.Generator) -> None:
    host, grads = normal(rng, [(4, 6)]), normal(rng, [(4, 6)])
    params = [cudatool.asarray(np.asfortranarray(host[0]).T).T]
    assert not params[0].is_contiguous()
    optimizer, formula = optim.Adam(params, lr=0.1), AdamFormula(host, lr=0.1)
    optimizer.step([cudatool.asarray(grads[0].T.copy()).T])
    formula.step(grads)
    assert_close(params, formula.params)


def test_lr_on_the_device_is_read_at_each_step() -> None:
    param, lr = cudatool.zeros(2), cudatool.full((), 0.5)
    optimizer = optim.SGD([param], lr=lr)
    optimizer.step([cudatool.ones(2)])
    lr.fill_(2)
    optimizer.step([cudatool.ones(2)])
    assert [-2.5, -2.5] == param.get().tolist()
    adam = optim.Adam([param], lr=lr)
    adam.step([cudatool.ones(2)])
    np.testing.assert_allclose(param.get(), [-4.5, -4.5], rtol=1e-6)


@pytest.mark.parametrize("make", [optim.Adam, lambda p, lr: optim.SGD(p, lr, momentum=0.9, dampening=0.5)])
def test_a_step_with_infinite_gradients_changes_nothing(make: Any) -> None:
    param, twin = cudatool.ones(3), cudatool.ones(3)
    optimizer, untouched = make([param], lr=0.1), make([twin], lr=0.1)
    optimizer.found_inf = cudatool.ones(())
    optimizer.step([cudatool.full(3, np.inf)])
    assert [1, 1, 1] == param.get().tolist()
    del optimizer.found_inf
    for each in (optimizer, untouched):
        each.step([cudatool.ones(3)])
        each.step([cudatool.full(3, 2)])
    np.testing.assert_array_equal(param.get(), twin.get())


@pytest.mark.parametrize("make", [optim.Adam, optim.SGD])
def test_grad_scale_divides_the_gradients_and_leaves_them_so(make: Any) -> None:
    param, twin, grad = cudatool.ones(3), cudatool.ones(3), cudatool.full(3, 24)
    optimizer = make([param], lr=0.1)
    optimizer.grad_scale = cudatool.full((), 8)
    optimizer.step([grad])
    make([twin], lr=0.1).step([cudatool.full(3, 3)])
    np.testing.assert_array_equal(param.get(), twin.get())
    assert [3, 3, 3] == grad.get().tolist()


def test_state_goes_on_in_another_optimizer(rng: np.random.Generator) -> None:
    host, grads = normal(rng), [normal(rng) for _ in range(4)]
    params = on_device(host)
    first = optim.AdamW(params, lr=0.1, amsgrad=True)
    for each in grads[:2]:
        first.step(on_device(each))
    saved = first.state_dict()
    saved["state"] = {i: {name: a.get() for name, a in own.items()} for i, own in saved["state"].items()}
    second = optim.AdamW(on_device([param.get() for param in params]), lr=7.0, amsgrad=True)
    addresses = [state["exp_avg"].data_ptr() for state in second.state]
    second.load_state_dict(saved)
    assert 0.1 == second.param_groups[0]["lr"]
    assert addresses == [state["exp_avg"].data_ptr() for state in second.state]
    for each in grads[2:]:
        first.step(on_device(each))
        second.step(on_device(each))
    for ours, theirs in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        np.testing.assert_array_equal(ours.get(), theirs.get())


def test_state_dict_has_the_form_of_torch() -> None:
    optimizer = optim.Adam([{"params": [cudatool.ones(2)]}, {"params": [cudatool.ones(1)], "lr": 5.0}])
    saved = optimizer.state_dict()
    assert [[0], [1]] == [group["params"] for group in saved["param_groups"]]
    assert {"step", "exp_avg", "exp_avg_sq"} == saved["state"][1].keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.Adam([]), "the list is empty"),
        (lambda p: optim.Adam([p], lr=-1), "lr must not be below 0: -1"),
        (lambda p: optim.Adam([p], betas=(0.9, 1.0)), "below 1"),
        (lambda p: optim.Adam([p, p]), "a parameter already"),
        (lambda p: optim.Adam([np.ones(3)]), "not ndarray"),
        (lambda p: optim.Adam([{"params": [p], "momentum": 1}]), "no option momentum"),
        (lambda p: optim.SGD([p], nesterov=True), "nesterov needs a momentum"),
        (lambda p: optim.SGD([p]).step([]), "0 gradients for 1 parameters"),
        (lambda p: optim.SGD([p]).step([cudatool.ones(4)]), "must have the same shape"),
        (lambda p: optim.SGD([p]).step([cudatool.ones((6,))[::2]]), "has gaps"),
        (lambda p: optim.SGD([cudatool.ones(3, np.int32)]).step([p]), "int32"),
        (lambda p: optim.SGD([p]).load_state_dict({"state": {}, "param_groups": []}), "groups of"),
        (lambda p: optim.Adam([p]).load_state_dict(optim.SGD([p]).state_dict()), "this optimizer needs"),
        (lambda p: optim.Adam([p], lr=cudatool.ones(2)), "lr must be a number, or one float32"),
    ],
)
def test_what_is_wrong_is_refused(make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(cudatool.ones(3))


def test_parameters_for_whose_state_there_is_no_memory_are_not_added() -> None:
    param, large = cudatool.ones(3), cudatool.ones(8 << 20)
    optimizer = optim.Adam([param], lr=0.5)
    cudatool.empty_cache()
    cudatool.set_per_process_memory_fraction(0.0)
    try:
        with pytest.raises(OutOfMemoryError):
            optimizer.add_param_group({"params": [large]})
    finally:
        cudatool.set_per_process_memory_fraction(1.0)
    optimizer.step([cudatool.ones(3)])
    assert [0.5, 0.5, 0.5] == param.get().tolist()


def test_many_arrays_take_few_launches(events: list[Event]) -> None:
    params, grads = ([cudatool.ones(4) for _ in range(50)] for _ in range(2))
    optimizer = optim.Adam(params)
    events.clear()
    optimizer.step(grads)
    assert 2 == sum(event.kind is Kind.KERNEL_LAUNCH for event in events)


def test_traces_say_what_a_step_accesses(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "wants_accesses", True)
    param, grad = cudatool.ones(4), cudatool.ones(4)
    optimizer = optim.SGD([param], momentum=0.9)
    events.clear()
    optimizer.step([grad])
    cudatool.synchronize()
    launch = next(event for event in events if event.kind is Kind.KERNEL_LAUNCH)
    touched = {
        (event.address, AccessFlag(event.flags) & (AccessFlag.READ | AccessFlag.WRITE))
        for event in events
        if event.kind is Kind.ACCESS and event.correlation == launch.correlation
    }
    assert (grad.data_ptr(), AccessFlag.READ) in touched
    written = {address for address, mode in touched if AccessFlag.WRITE in mode}
    assert {param.data_ptr(), optimizer.state[0]["momentum_buffer"].data_ptr()} == written
    assert not [event for event in events if event.kind is Kind.WARNING]


# Lists of arrays.


def test_lists_are_scaled_added_to_copied_and_zeroed(rng: np.random.Generator) -> None:
    host = normal(rng)
    arrays = on_device(host)
    optim.foreach_scale_(arrays, 0.5)
    assert_close(arrays, [array / 2 for array in host])
    optim.foreach_scale_(arrays, cudatool.full((), 4, np.float64))
    optim.foreach_add_(arrays, 1.0)
    assert_close(arrays, [array * 2 + 1 for array in host])
    halves = [cudatool.empty(array.shape, np.float16) for array in host]
    optim.foreach_copy_(halves, on_device(host))
    for half, array in zip(halves, host, strict=True):
        np.testing.assert_array_equal(half.get(), array.astype(np.float16))
    arrays[0].fill_(np.nan)
    optim.foreach_zero_(arrays)
    assert_close(arrays, zeros_like(host))


@pytest.mark.parametrize("p", [1, 2, 3.5, math.inf])
def test_total_norm(rng: np.random.Generator, p: float) -> None:
    host = [*normal(rng, [(3, 5), (), CHUNK + 3, (0,)]), *normal(rng, [(9,)], np.float16)]
    flat = np.concatenate([array.astype(np.float64).ravel() for array in host])
    total = optim.get_total_norm(on_device(host), p)
    assert ((), np.float32) == (total.shape, total.dtype)
    np.testing.assert_allclose(total.get(), np.linalg.norm(flat, p), rtol=1e-6)


def test_total_norm_of_nothing_is_zero_and_of_float64_is_float64() -> None:
    assert 0 == optim.get_total_norm([]).get()
    assert 0 == optim.get_total_norm([cudatool.empty(0)]).get()
    assert np.float64 == optim.get_total_norm([cudatool.ones(2), cudatool.ones(2, np.float64)]).dtype


@pytest.mark.parametrize("p", [2, math.inf])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_shows_or_raises(p: float, bad: float) -> None:
    grads = [cudatool.ones(700), cudatool.asarray(np.float32([1, bad, 1]))]
    assert not np.isfinite(optim.get_total_norm(grads, p).get())
    with pytest.raises(UsageError, match="cannot be clipped"):
        optim.clip_grad_norm_(grads, 1.0, p, error_if_nonfinite=True)
    assert [1, 1] == grads[1].get()[[0, 2]].tolist()


def test_gradients_are_clipped_to_a_norm_and_small_ones_left_alone(rng: np.random.Generator) -> None:
    host = normal(rng)
    grads = on_device(host)
    norm = float(np.sqrt(sum(np.sum(array.astype(np.float64) ** 2) for array in host)))
    found = optim.clip_grad_norm_(grads, norm / 4)
    np.testing.assert_allclose(found.get(), norm, rtol=1e-6)
    assert_close(grads, [array / 4 for array in host])
    before = [grad.get() for grad in grads]
    optim.clip_grad_norm_(grads, norm)
    for grad, array in zip(grads, before, strict=True):
        np.testing.assert_array_equal(grad.get(), array)


def test_unscaling_finds_what_is_not_finite(rng: np.random.Generator) -> None:
    for bad, expected in ((1.0, 0), (np.inf, 1), (-np.inf, 1), (np.nan, 1)):
        host = [*normal(rng), np.float16([2, bad, 3])]
        grads, found_inf = on_device(host), cudatool.zeros(())
        optim.amp_foreach_non_finite_check_and_unscale_(grads, found_inf, cudatool.full((), 0.25))
        assert expected == found_inf.get()
        assert_close(grads, [array / 4 for array in host])


def test_a_scale_grows_after_an_interval_and_backs_off_at_once() -> None:
    scale, tracker, found_inf = cudatool.full((), 4.0), cudatool.zeros((), np.int32), cudatool.zeros(())
    history = []
    for bad in (0, 0, 0, 1, 0, 0):
        found_inf.fill_(bad)
        assert scale is optim.amp_update_scale_(scale, tracker, found_inf, 2.0, 0.25, 2)
        history.append((float(scale.get()), int(tracker.get())))
    assert [(4, 1), (8, 0), (8, 1), (2, 0), (2, 1), (4, 0)] == history


def test_a_scale_never_grows_to_infinity() -> None:
    scale, tracker = cudatool.full((), 3e38), cudatool.zeros((), np.int32)
    optim.amp_update_scale_(scale, tracker, cudatool.zeros(()), 2.0, 0.5, 1)
    assert (np.float32(3e38), 0) == (scale.get(), tracker.get())


def test_threads_of_our_kernels_do_not_race(device: str, tmp_path: Path) -> None:
    if device != "sim":
        pytest.skip("the software device looks for races inside of kernels")
    program = tmp_path / "step.py"
    program.write_text(
        "import numpy as np, cudatool\n"
        "from cudatool import optim\n"
        "grads = [cudatool.full(2000, np.inf)]\n"
        "optim.clip_grad_norm_(grads, 1.0)\n"
        "optim.amp_foreach_non_finite_check_and_unscale_(grads, cudatool.zeros(()), cudatool.full((), 0.5))\n"
    )
    done = run_python(COMMAND_LINE, "sanitize", "--checks", "race,racecheck,memcheck", str(program))
    assert (0, True) == (done.returncode, "no findings" in done.stdout + done.stderr), done.stdout


def test_loading_a_state_keeps_the_rate_that_graphs_read_and_takes_no_others() -> None:
    param = cudatool.ones(3)
    rate, other = cudatool.full((), 0.5), cudatool.full((), 0.25)
    saved = optim.SGD([cudatool.ones(3)], lr=other).state_dict()
    on_device, by_number = optim.SGD([param], lr=rate), optim.SGD([param], lr=0.1)
    for optimizer in (on_device, by_number):
        optimizer.load_state_dict(saved)
    other.fill_(8)
    assert on_device.param_groups[0]["lr"] is rate
    assert float(rate.get()) == 0.25
    assert float(by_number.param_groups[0]["lr"].get()) == 0.25
    on_device.load_state_dict(optim.SGD([param], lr=2.0).state_dict())
    assert float(rate.get()) == 2.0
