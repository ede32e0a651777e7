"""Gradient scaling and autocast."""

from __future__ import annotations

import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import amp, blas, ops, optim
from cudatool.amp import _grad_scaler
from cudatool.amp._policy import POLICIES, CastPolicy
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.graphs import CUDAGraph, graph
from cudatool.ops import registered
from cudatool.trace.events import Event, Kind

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WAITS = {Kind.STREAM_SYNCHRONIZE, Kind.DEVICE_SYNCHRONIZE, Kind.EVENT_SYNCHRONIZE}


class PlainOptimizer:
    """One of somebody else's, which knows nothing of scaling."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def step(self, grads: list[cudatool.DeviceArray]) -> str:
        self.seen.append([grad.get().tolist() for grad in grads])
        return "stepped"


def scaler_with(**options: Any) -> amp.GradScaler:
    """Return a scaler whose scale is on the device."""
    scaler = amp.GradScaler(**options)
    scaler.scale(cudatool.ones(()))
    return scaler


# GradScaler: decisions.


def expected_scales(finite: list[bool], scale: float, growth: float, backoff: float, interval: int) -> list[float]:
    """Return the scale after each step, as torch's documentation says it."""
    scales, count = [], 0
    for good in finite:
        if good:
            count += 1
            if count == interval:
                scale, count = scale * growth, 0
        else:
            scale, count = scale * backoff, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("make", [lambda param: optim.SGD([param], lr=1.0), lambda param: PlainOptimizer()])
def test_scale_follows_the_gradients(make: Any) -> None:
    finite = [True, True, True, False, True, False, False, True, True, True]
    options = {"growth_factor": 4.0, "backoff_factor": 0.25}
    scaler = scaler_with(init_scale=8.0, growth_interval=2, **options)
    optimizer, found = make(cudatool.zeros(2)), []
    for good in finite:
        scaler.step(optimizer, [cudatool.full(2, 1.0 if good else np.inf)])
        scaler.update()
        found.append(scaler.get_scale())
    assert expected_scales(finite, 8.0, 4.0, 0.25, 2) == found


def test_a_fused_step_divides_by_the_scale_and_is_left_out_at_infinity() -> None:
    param = cudatool.zeros(2)
    optimizer, scaler = optim.SGD([param], lr=1.0), scaler_with(init_scale=4.0)
    scaler.step(optimizer, [cudatool.full(2, 12.0)])
    scaler.update()
    assert [-3, -3] == param.get().tolist()
    scaler.step(optimizer, [cudatool.asarray(np.float32([1, np.nan]))])
    scaler.update()
    assert ([-3, -3], 2.0) == (param.get().tolist(), scaler.get_scale())
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_a_fused_step_without_memory_leaves_no_scale_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    param = cudatool.zeros(2)
    scaler, optimizer = scaler_with(init_scale=8.0), optim.SGD([param], lr=1.0)

    def no_memory(*_: object) -> None:
        raise OutOfMemoryError("none is left")

    with monkeypatch.context() as short:
        short.setattr(_grad_scaler, "_combined", no_memory)
        with pytest.raises(OutOfMemoryError):
            scaler.step(optimizer, [cudatool.full(2, 16.0)])
    scaler.update()
    scaler.step(optimizer, [cudatool.full(2, 16.0)])
    assert [-2.0, -2.0] == param.get().tolist()


def test_another_optimizer_sees_unscaled_gradients_or_none() -> None:
    optimizer, scaler = PlainOptimizer(), scaler_with(init_scale=4.0)
    assert "stepped" == scaler.step(optimizer, [cudatool.full(2, 12.0)])
    scaler.update()
    assert scaler.step(optimizer, [cudatool.full(2, np.inf)]) is None
    assert [[[3, 3]]] == optimizer.seen


def test_gradients_unscaled_by_hand_are_not_divided_again() -> None:
    param, grad = cudatool.zeros(2), cudatool.full(2, 12.0)
    optimizer, scaler = optim.SGD([param], lr=1.0), scaler_with(init_scale=4.0)
    scaler.unscale_(optimizer, [grad])
    assert [3, 3] == grad.get().tolist()
    optim.clip_grad_norm_([grad], 1e-6)
    grad.fill_(0.5)
    scaler.step(optimizer, [grad])
    assert [-0.5, -0.5] == param.get().tolist()


def test_an_infinity_found_when_unscaling_by_hand_skips_the_step() -> None:
    param, grad = cudatool.zeros(2), cudatool.full(2, np.inf)
    optimizer, scaler = optim.SGD([param], lr=1.0), scaler_with(init_scale=4.0)
    scaler.unscale_(optimizer, [grad])
    scaler.step(optimizer, [cudatool.ones(2)])
    scaler.update()
    assert ([0, 0], 2.0) == (param.get().tolist(), scaler.get_scale())


def test_half_precision_gradients_are_unscaled_by_the_fused_step() -> None:
    param = cudatool.zeros(2, np.float16)
    optimizer, scaler = optim.SGD([param], lr=1.0, master_weights=True), scaler_with(init_scale=2.0**13)
    scaler.step(optimizer, [cudatool.full(2, 3 * 2.0**13, np.float16)])
    assert [-3, -3] == param.get().tolist()


def test_one_infinity_backs_off_for_all_optimizers() -> None:
    params = [cudatool.zeros(1), cudatool.zeros(1)]
    optimizers, scaler = [optim.SGD([param], lr=1.0) for param in params], scaler_with(init_scale=4.0)
    scaler.step(optimizers[0], [cudatool.full(1, np.inf)])
    scaler.step(optimizers[1], [cudatool.full(1, 4.0)])
    scaler.update()
    assert (0, -1, 2.0) == (params[0].get()[0], params[1].get()[0], scaler.get_scale())


def test_nothing_waits_for_the_device(events: list[Event]) -> None:
    param, grad, scaler = cudatool.zeros(2), cudatool.ones(2), amp.GradScaler()
    optimizer = optim.Adam([param])
    events.clear()
    for _ in range(2):
        scaler.scale(grad)
        scaler.unscale_(optimizer, [grad])
        scaler.step(optimizer, [grad])
        scaler.update()
    assert not [event for event in events if event.kind in WAITS]
    scaler.get_scale()
    assert [event for event in events if event.kind in WAITS]


# GradScaler: scaling outputs.


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [((), "f4", "f4"), ((), "f2", "f4"), ((3,), "f2", "f2"), ((2, 2), "f8", "f8"), ((), "f8", "f8")],
)
def test_outputs_keep_their_precision_except_half_scalars(shape: Any, dtype: str, expected: str) -> None:
    found = amp.GradScaler(init_scale=8.0).scale(cudatool.full(shape, 3, dtype))
    assert (shape, expected) == (found.shape, found.dtype.str[1:])
    assert np.all(found.get() == 24)


def test_nested_outputs_come_back_as_they_are() -> None:
    one = cudatool.ones(1)
    found = amp.GradScaler(init_scale=4.0).scale([one, (one, [one]), iter([one])])
    assert isinstance(found, list)
    assert isinstance(found[1], tuple)
    assert [4.0] * 4 == [float(a.get()[0]) for a in (found[0], found[1][0], found[1][1][0], next(found[2]))]
    assert [1] == one.get().tolist()


def test_outputs_with_gaps_are_scaled() -> None:
    found = amp.GradScaler(init_scale=4.0).scale(cudatool.asarray(np.arange(6.0, dtype="f4"))[::2])
    assert [0, 8, 16] == found.get().tolist()


def test_a_disabled_scaler_does_nothing() -> None:
    scaler, optimizer, one = amp.GradScaler(enabled=False), PlainOptimizer(), cudatool.full(1, np.inf)
    assert scaler.scale(one) is one
    assert "stepped" == scaler.step(optimizer, [one])
    scaler.unscale_(optimizer, [one])
    scaler.update()
    scaler.load_state_dict({})
    assert (1.0, {}, False) == (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled())


# GradScaler: state.


def test_state_is_numbers_and_loads_before_and_after_first_use() -> None:
    scaler = scaler_with(init_scale=8.0, growth_factor=3.0, backoff_factor=0.5, growth_interval=7)
    scaler.step(PlainOptimizer(), [cudatool.ones(1)])
    scaler.update()
    expected = {"scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 1}
    assert expected == scaler.state_dict()
    for other in (amp.GradScaler(), scaler_with()):
        other.load_state_dict(expected)
        other.scale(cudatool.ones(()))
        assert expected == other.state_dict()
    assert expected == pickle.loads(pickle.dumps(scaler)).state_dict()


def test_factors_and_interval_can_be_changed() -> None:
    scaler = scaler_with(init_scale=8.0)
    scaler.set_growth_factor(5.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(1)
    assert (5.0, 0.125, 1) == (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    for bad, expected in ((False, 40.0), (True, 5.0)):
        scaler.step(PlainOptimizer(), [cudatool.full(1, np.inf if bad else 1.0)])
        scaler.update()
        assert expected == scaler.get_scale()


def test_update_takes_a_new_scale() -> None:
    scaler = scaler_with()
    scaler.update(3.0)
    assert 3.0 == scaler.get_scale()
    scaler.update(cudatool.full(1, 5.0))
    assert 5.0 == scaler.get_scale()


def twice(scaler: Any, optimizer: Any, first: str, second: str) -> None:
    for name in (first, second):
        getattr(scaler, name)(optimizer, [cudatool.ones(1)])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s, o: amp.GradScaler(growth_factor=1.0), "growth_factor must be above 1"),
        (lambda s, o: amp.GradScaler(backoff_factor=1.0), "backoff_factor must be above 0 and below 1"),
        (lambda s, o: amp.GradScaler().unscale_(o, []), r"unscale_\(\) before anything was scaled"),
        (lambda s, o: amp.GradScaler().step(o, []), r"step\(\) before anything was scaled"),
        (lambda s, o: amp.GradScaler().update(), r"update\(\) before anything was scaled"),
        (lambda s, o: s.update(), "no gradients were checked"),
        (lambda s, o: s.step(o, [None]), "no gradients to check"),
        (lambda s, o: s.step(o, [], closure=print), "closure"),
        (lambda s, o: twice(s, o, "unscale_", "unscale_"), "already been called on this optimizer"),
        (lambda s, o: twice(s, o, "step", "unscale_"), r"unscale_\(\) is being called after step"),
        (lambda s, o: twice(s, o, "step", "step"), r"step\(\) has already been called"),
        (lambda s, o: s.unscale_(o, [cudatool.ones(1, np.float16)]), "float16"),
        (lambda s, o: s.scale(3.0), "must be an array or an iterable"),
        (lambda s, o: s.update(cudatool.ones(2)), "new_scale must be"),
        (lambda s, o: s.load_state_dict({}), "empty"),
        (lambda s, o: (s.unscale_(o, [cudatool.ones(1)]), pickle.dumps(s)), "pickled after"),
    ],
)
def test_what_is_wrong_is_refused(use: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        use(scaler_with(), PlainOptimizer())


# autocast: which operation is in which class.

# torch's lists for CUDA: https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior", and the
# operations of the library underneath that it leaves out there (vdot, native_layer_norm).
LOWER = """
    matmul addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d GRUCell linear LSTMCell mm mv prelu RNNCell
"""
FLOAT32 = """
    pow acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity cross_entropy
    cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm native_layer_norm log
    log10 log_softmax log1p log2 logsumexp margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss
    norm normalize pdist poisson_nll_loss prod reciprocal rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax
    softmin softplus sum renorm tan triplet_margin_loss
"""
WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot vdot"
OURS = "addmm_activation mm_epilogue"  # products that cuBLASLt fuses with more
CLASSES = {
    **dict.fromkeys(f"{LOWER} {OURS}".split(), (CastPolicy.LOWER_PRECISION,)),
    **dict.fromkeys(FLOAT32.split(), (CastPolicy.FLOAT32, CastPolicy.FLOAT32_RESULT)),
    **dict.fromkeys(WIDEST.split(), (CastPolicy.WIDEST,)),
}


def test_every_operation_is_in_the_class_that_torch_puts_it_in() -> None:
    operations = {
        member.name for package in (blas, ops) for member in vars(package).values() if isinstance(member, ops.Op)
    }
    found = {name: POLICIES.get(name) for name in operations}
    allowed = {name: CLASSES.get(name.rpartition(".")[2], (None,)) for name in operations}
    assert {} == {name: policy for name, policy in found.items() if policy not in allowed[name]}


def test_no_class_names_an_operation_that_does_not_exist() -> None:
    assert set() == POLICIES.keys() - registered().keys()


def test_operations_whose_result_has_a_dtype_of_its_own_take_one() -> None:
    wanting = {name for name, policy in POLICIES.items() if policy is CastPolicy.FLOAT32_RESULT}
    assert wanting == {name for name in wanting if "dtype" in inspect.signature(registered()[name]).parameters}


# autocast: regions.


def product() -> np.dtype[Any]:
    """Return the dtype in which a product of float32 runs."""
    return blas.mm(cudatool.ones((2, 2)), cudatool.ones((2, 2))).dtype


def test_regions_nest_and_end() -> None:
    found = [(product(), amp.is_autocast_enabled())]
    with amp.autocast():
        found.append((product(), amp.is_autocast_enabled()))
        with amp.autocast(enabled=False):
            found.append((product(), amp.is_autocast_enabled()))
            with amp.autocast(dtype=BFLOAT16):
                found.append((product(), amp.is_autocast_enabled()))
        found.append((product(), amp.is_autocast_enabled()))
    found.append((product(), amp.is_autocast_enabled()))
    half = np.float16
    assert [np.float32, half, np.float32, BFLOAT16, half, np.float32] == [dtype for dtype, _ in found]
    assert [False, True, False, True, True, False] == [enabled for _, enabled in found]


def test_a_region_inherits_dtype_and_cache_of_the_one_around() -> None:
    assert (np.float16, True) == (amp.get_autocast_dtype(), amp.is_autocast_cache_enabled())
    with amp.autocast(dtype=BFLOAT16, cache_enabled=False), amp.autocast():
        assert (BFLOAT16, False) == (amp.get_autocast_dtype(), amp.is_autocast_cache_enabled())


def test_a_region_ends_when_something_fails() -> None:
    with pytest.raises(ZeroDivisionError), amp.autocast():
        raise ZeroDivisionError
    assert not amp.is_autocast_enabled()


def test_a_decorated_function_runs_under_autocast_also_when_it_calls_itself() -> None:
    @amp.autocast()
    def run(depth: int) -> list[np.dtype[Any]]:
        return [product(), *(run(depth - 1) if depth else [])]

    assert [np.float16] * 3 == run(2)
    assert np.float32 == product()


def test_a_region_is_of_one_thread() -> None:
    with amp.autocast(), ThreadPoolExecutor(1) as other:
        assert np.float32 == other.submit(product).result()


def test_a_call_with_out_is_left_alone() -> None:
    out = cudatool.empty((2, 2))
    with amp.autocast():
        assert blas.mm(cudatool.ones((2, 2)), cudatool.ones((2, 2)), out=out) is out
    assert np.all(out.get() == 2)


def test_arrays_of_any_strides_are_cast() -> None:
    host = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    array = cudatool.asarray(host)
    for view in (lambda a: a.T, lambda a: a[:, ::2], lambda a: a[::-1]):
        expected = view(host)
        with amp.autocast():
            found = blas.mm(view(array), cudatool.asarray(np.eye(expected.shape[1], dtype=np.float32)))
        np.testing.assert_array_equal(found.get(), expected.astype(np.float16))


def test_the_wanted_dtype_of_a_result_counts() -> None:
    with amp.autocast():
        assert np.float64 == ops.sum(cudatool.ones(3, np.float16), dtype=np.float64).dtype


def casts(events: list[Event]) -> int:
    return sum(event.kind is Kind.KERNEL_LAUNCH for event in events)  # a product is a GEMM


def test_parameters_are_cast_once_in_the_outermost_region(events: list[Event]) -> None:
    weight, data = cudatool.ones((2, 2)), cudatool.ones((2, 2), np.float16)
    optimizer = optim.SGD([weight], lr=1.0)
    for cache_enabled, expected in ((True, 1), (False, 3)):
        events.clear()
        with amp.autocast(cache_enabled=cache_enabled):
            blas.mm(data, weight)
            with amp.autocast():
                blas.mm(data, weight)
            blas.mm(data, weight)
        assert expected == casts(events)
    optimizer.step([cudatool.ones((2, 2))])  # to zero: what was cast before counts no longer
    with amp.autocast():
        assert 0 == float(blas.mm(data, weight).get().max())


def test_other_arrays_are_cast_each_time(events: list[Event]) -> None:
    data, changing = cudatool.ones((2, 2), np.float16), cudatool.ones((2, 2))
    with amp.autocast():
        blas.mm(data, changing)
        changing.fill_(2.0)
        assert 4 == float(blas.mm(data, changing).get().max())
    assert 2 == casts(events)


def test_clearing_the_cache_casts_again(events: list[Event]) -> None:
    weight = cudatool.ones((2, 2))
    optimizer = optim.SGD([weight])
    with amp.autocast():
        blas.mm(weight, weight)
        amp.clear_autocast_cache()
        blas.mm(weight, weight)
    assert 2 == casts(events)
    del optimizer


def test_a_graph_contains_the_casts_that_it_uses() -> None:
    weight, data = cudatool.ones((2, 2)), cudatool.ones((2, 2))
    optimizer, captured = optim.SGD([weight], lr=1.0), CUDAGraph()
    with amp.autocast():
        blas.mm(data, weight)
        cudatool.synchronize()
        with graph(captured):
            found = blas.mm(data, weight)
    weight.fill_(3.0)
    captured.replay()
    assert np.all(found.get() == 6)
    del optimizer


def test_two_half_precisions_do_not_mix() -> None:
    with amp.autocast(), pytest.raises(UsageError, match="one half precision at a time"):
        ops.atan2(cudatool.ones(2, np.float16), cudatool.ones(2, BFLOAT16))


def test_a_function_gets_its_inputs_in_the_precision_it_wants() -> None:
    @amp.custom_fwd(cast_inputs=np.float32)
    def forward(x: Any, *, also: Any, number: int) -> Any:
        return x.dtype, also.dtype, product(), number, amp.is_autocast_enabled()

    half, double = cudatool.ones(2, np.float16), cudatool.ones(2, np.float64)
    assert (np.float16, np.float64, np.float32, 3, False) == forward(half, also=double, number=3)
    with amp.autocast():
        assert (np.float32, np.float64, np.float32, 3, False) == forward(half, also=double, number=3)

    @amp.custom_fwd
    def unchanged(x: Any) -> Any:
        return x.dtype, product()

    with amp.autocast():
        assert (np.float16, np.float16) == unchanged(half)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_autocast_is_to_half_precision(dtype: Any) -> None:
    with pytest.raises(UsageError, match="float16 or bfloat16"):
        amp.autocast(dtype=dtype)


def test_the_type_of_device_is_cuda() -> None:
    with amp.autocast("cuda"):
        assert amp.is_autocast_enabled("cuda")
        assert np.float16 == amp.get_autocast_dtype("cuda")
    assert amp.GradScaler("cuda").is_enabled()
    for use in (amp.autocast, amp.GradScaler, amp.is_autocast_enabled, amp.get_autocast_dtype):
        with pytest.raises(UsageError, match="not 'cpu'"):
            use("cpu")


def test_only_functions_are_decorated() -> None:
    with pytest.raises(UsageError, match="use with"):
        amp.autocast()(3)  # type: ignore[arg-type]


class Regression:
    """Least squares with all of mixed precision in a step: cast products, scaled loss, clipping, master weights."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.weight = cudatool.asarray(rng.normal(size=(6, 3)).astype(np.float32))
        self.optimizer = optim.AdamW([self.weight], lr=0.1)
        self.scaler = amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        self.scaler.scale(cudatool.ones(()))
        self.x, self.y = cudatool.zeros((8, 6)), cudatool.zeros((8, 3))

    def step(self) -> None:
        with amp.autocast("cuda"):
            error = blas.mm(self.x, self.weight) - self.y
            scaled = self.scaler.scale(error)
            grads = [cudatool.asarray(blas.mm(self.x.T, scaled), np.float32)]
        self.scaler.unscale_(self.optimizer, grads)
        optim.clip_grad_norm_(grads, 5.0)
        self.scaler.step(self.optimizer, grads)
        self.scaler.update()


def test_a_whole_step_is_one_graph() -> None:
    eager, graphed = (Regression(np.random.default_rng(1)) for _ in range(2))
    captured = CUDAGraph()
    cudatool.synchronize()
    with graph(captured):
        graphed.step()
    rng, scales = np.random.default_rng(2), []
    for count in range(6):
        x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 3))
        if count == 3:
            x[0, 0] = 1e6  # beyond float16
        for model in (eager, graphed):
            model.x.copy_(x)
            model.y.copy_(y)
        eager.step()
        captured.replay()
        np.testing.assert_array_equal(graphed.weight.get(), eager.weight.get())
        scales.append(graphed.scaler.get_scale())
    assert [1024, 2048, 2048, 1024, 1024, 2048] == scales


def test_a_number_over_an_array_is_computed_in_float32() -> None:
    half = cudatool.asarray(np.array([3.0], np.float16))
    with amp.autocast():
        assert np.float32 == (1 / half).dtype
        assert np.float16 == (half / 1).dtype
