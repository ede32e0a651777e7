"""autocast and GradScaler beside torch's on the same GPU: the same dtypes, the same decisions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import amp, blas, ops, optim
from cudatool.amp._policy import POLICIES

pytestmark = pytest.mark.gpu


SQUARE, VECTOR, BATCH = (8, 8), (8,), (2, 8, 8)
ARGUMENTS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    # operation -> shapes of its arrays, and the rest
    "blas.addmm": ([SQUARE, SQUARE, SQUARE], {}),
    "blas.addmv": ([VECTOR, SQUARE, VECTOR], {}),
    "blas.baddbmm": ([BATCH, BATCH, BATCH], {}),
    "blas.bmm": ([BATCH, BATCH], {}),
    "blas.dot": ([VECTOR, VECTOR], {}),
    "blas.linear": ([SQUARE, SQUARE, VECTOR], {}),
    "blas.matmul": ([BATCH, SQUARE], {}),
    "blas.mm": ([SQUARE, SQUARE], {}),
    "blas.mv": ([SQUARE, VECTOR], {}),
    "blas.vdot": ([VECTOR, VECTOR], {}),
    "ops.add": ([SQUARE, SQUARE], {}),
    "ops.addcdiv": ([SQUARE, SQUARE, SQUARE], {}),
    "ops.addcmul": ([SQUARE, SQUARE, SQUARE], {}),
    "ops.amax": ([SQUARE], {}),
    "ops.atan2": ([SQUARE, SQUARE], {}),
    "ops.div": ([SQUARE, SQUARE], {}),
    "ops.eq": ([SQUARE, SQUARE], {}),
    "ops.erf": ([SQUARE], {}),
    "ops.exp": ([SQUARE], {}),
    "ops.expm1": ([SQUARE], {}),
    "ops.gelu": ([SQUARE], {}),
    "ops.layer_norm": ([SQUARE], {"normalized_shape": VECTOR}),
    "ops.log": ([SQUARE], {}),
    "ops.log10": ([SQUARE], {}),
    "ops.log1p": ([SQUARE], {}),
    "ops.log2": ([SQUARE], {}),
    "ops.log_softmax": ([SQUARE], {"dim": 1}),
    "ops.logsumexp": ([SQUARE], {"dim": 1}),
    "ops.mean": ([SQUARE], {}),
    "ops.mul": ([SQUARE, SQUARE], {}),
    "ops.norm": ([SQUARE], {}),
    "ops.pow": ([SQUARE, SQUARE], {}),
    "ops.prod": ([VECTOR], {}),
    "ops.reciprocal": ([SQUARE], {}),
    "ops.relu": ([SQUARE], {}),
    "ops.rsqrt": ([SQUARE], {}),
    "ops.sigmoid": ([SQUARE], {}),
    "ops.softmax": ([SQUARE], {"dim": 1}),
    "ops.softplus": ([SQUARE], {}),
    "ops.sqrt": ([SQUARE], {}),
    "ops.sum": ([SQUARE], {}),
    "ops.tan": ([SQUARE], {}),
    "ops.tanh": ([SQUARE], {}),
    "ops.var": ([SQUARE], {}),
}
WITHOUT = {"addmm_activation", "mm_epilogue", "native_layer_norm", "cross_entropy"}  # other names, or below
# Every operation of a class is compared. No test, since without a GPU this file is imported and its tests are not run.
assert {f"{package}.{name}" for package in ("ops", "blas") for name in WITHOUT} >= {
    name.removeprefix("cudatool.") for name in POLICIES
} - ARGUMENTS.keys()


def of_torch(torch: Any, name: str) -> Any:
    places = (torch.nn.functional, torch) if name in ("linear", "gelu", "layer_norm", "softplus") else (torch,)
    return getattr(places[0], name)


@pytest.mark.parametrize("given", [("float32",), ("float16",), ("float32", "float16"), ("float64",)], ids="+".join)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_results_have_dtype_and_values_of_torch(torch: Any, name: str, given: tuple[str, ...]) -> None:
    rng = np.random.default_rng(3)
    shapes, options = ARGUMENTS[name]
    host = [(rng.random(shape) + 0.5).astype(given[i % len(given)]) for i, shape in enumerate(shapes)]
    package, _, member = name.partition(".")
    ours = getattr({"blas": blas, "ops": ops}[package], member)
    theirs = of_torch(torch, member)
    with torch.autocast("cuda"):
        try:
            expected = theirs(*[torch.from_numpy(array).cuda() for array in host], **options)
        except RuntimeError:
            expected = None  # of dtypes that do not fit each other
    if expected is None:
        with amp.autocast("cuda"), pytest.raises(cudatool.CudatoolError):
            ours(*[cudatool.asarray(array) for array in host], **options)
        return
    with amp.autocast("cuda"):
        found = ours(*[cudatool.asarray(array) for array in host], **options)
    values = expected.cpu().numpy()
    assert values.dtype == found.dtype
    tolerance = {"float16": 4e-3, "float32": 2e-5}.get(values.dtype.name, 1e-12)
    np.testing.assert_allclose(found.get(), values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["blas.mm", "blas.linear", "ops.softmax", "ops.add"])
def test_bfloat16_results_have_the_dtype_of_torch(torch: Any, name: str) -> None:
    shapes, options = ARGUMENTS[name]
    host = [np.ones(shape, np.float32) for shape in shapes]
    package, _, member = name.partition(".")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = of_torch(torch, member)(*[torch.from_numpy(array).cuda() for array in host], **options)
    with amp.autocast("cuda", dtype=ml_dtypes.bfloat16):
        found = getattr({"blas": blas, "ops": ops}[package], member)(*map(cudatool.asarray, host), **options)
    assert str(expected.dtype) == f"torch.{found.dtype}"


def test_a_loss_has_dtype_and_value_of_torch(torch: Any) -> None:
    rng = np.random.default_rng(4)
    scores, classes = rng.normal(size=(5, 7)).astype(np.float16), np.array([0, 6, 3, 3, 1])
    with torch.autocast("cuda"):
        expected = torch.nn.functional.cross_entropy(*[torch.from_numpy(array).cuda() for array in (scores, classes)])
    with amp.autocast("cuda"):
        found = ops.cross_entropy(cudatool.asarray(scores), cudatool.asarray(classes))
    assert str(expected.dtype) == f"torch.{found.dtype}"
    # torch keeps the logarithms of probabilities in the dtype of the scores, float16, and sums them as float32.
    np.testing.assert_allclose(found.get(), expected.cpu().numpy(), rtol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_the_scaler_decides_as_torchs(torch: Any, fused: bool, separate: bool) -> None:
    """The same losses and gradients, some of them infinite; the parameters and the states after each step."""
    rng = np.random.default_rng(8)
    host = [rng.normal(size=shape).astype(np.float32) for shape in ((5, 5), (3,))]
    ours = [cudatool.asarray(array) for array in host]
    theirs = [torch.nn.Parameter(torch.from_numpy(array.copy()).cuda()) for array in host]
    options = {"init_scale": 2.0**8, "growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 3}
    our_scaler, their_scaler = amp.GradScaler("cuda", **options), torch.amp.GradScaler("cuda", **options)
    optimizer, their_optimizer = optim.Adam(ours, lr=0.1), torch.optim.Adam(theirs, lr=0.1, fused=fused)
    for step in range(40):
        loss = rng.normal()
        expected = their_scaler.scale(torch.tensor(loss, device="cuda", dtype=torch.float32))
        found = our_scaler.scale(cudatool.full((), loss))
        assert float(found.get()) == float(expected.cpu())
        grads = [(rng.normal(size=array.shape) * our_scaler.get_scale()).astype(np.float32) for array in host]
        if rng.random() < 0.2:
            grads[int(rng.integers(2))].flat[1] = rng.choice([np.inf, -np.inf, np.nan])
        given = [cudatool.asarray(grad) for grad in grads]
        for tensor, grad in zip(theirs, grads, strict=True):
            tensor.grad = torch.from_numpy(grad.copy()).cuda()
        if separate:
            our_scaler.unscale_(optimizer, given)
            their_scaler.unscale_(their_optimizer)
        our_scaler.step(optimizer, given)
        their_scaler.step(their_optimizer)
        if step % 11 == 10:
            our_scaler.update(64.0)
            their_scaler.update(64.0)
        else:
            our_scaler.update()
            their_scaler.update()
        assert our_scaler.state_dict() == their_scaler.state_dict()
        for our, their in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(our.get(), their.detach().cpu().numpy(), rtol=1e-5, atol=1e-6)
