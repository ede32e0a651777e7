"""Operations give what PyTorch's give on the same GPU: values of every dtype, special values, dtypes of results."""

from __future__ import annotations

import inspect
import itertools
from importlib.util import find_spec

import numpy as np
import pytest

import cudatool
import cudatool.jiterator
from cudatool import ops
from cudatool.errors import UsageError

pytestmark = pytest.mark.gpu

if find_spec("torch") is not None:
    import torch
    from torch.nn import functional

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
DTYPES = ["bool", *INTEGERS, *FLOATS, "complex64", "complex128"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, np.inf, -np.inf, np.nan]
TOLERANCES = {
    "float16": 1e-3,
    "bfloat16": 8e-3,
    "float32": 2e-6,
    "float64": 1e-14,
    "complex64": 2e-6,
    "complex128": 1e-14,
}


@pytest.fixture(autouse=True)
def torch_and_gpu() -> None:
    if find_spec("torch") is None or not torch.cuda.is_available():
        pytest.skip("PyTorch with CUDA is not installed")
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


def dtype_of(name):
    return getattr(cudatool, name, None) or np.dtype(name)


def ours(tensor):
    """Return a copy of a tensor as one of our arrays, also of dtypes that NumPy does not have."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    name = str(tensor.dtype).removeprefix("torch.")
    words = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}.get(name)
    host = tensor.detach().contiguous().cpu()
    return cudatool.asarray(host.numpy() if words is None else host.view(words).numpy().view(dtype_of(name)))


def close(actual, expected, factor=4.0):
    """Compare an array of ours with a tensor: dtype, shape, and values within some units of the last place."""
    name = str(expected.dtype).removeprefix("torch.")
    assert np.dtype(dtype_of(name)) == actual.dtype
    assert tuple(expected.shape) == actual.shape
    wide = np.complex128 if name.startswith("complex") else np.float64
    host = expected.detach().cpu()
    theirs = (host.float() if name == "bfloat16" or name in FP8 else host).numpy().astype(wide)
    tolerance = factor * TOLERANCES.get(name, 0)
    np.testing.assert_allclose(actual.get().astype(wide), theirs, rtol=tolerance, atol=tolerance * 1e-2)


def near(actual, expected, factor=20.0):
    """Compare values that were summed in another order: those near 0 may have lost all their places."""
    name = str(expected.dtype).removeprefix("torch.")
    assert np.dtype(dtype_of(name)) == actual.dtype
    scale = factor * TOLERANCES.get(name, 0)
    host = expected.detach().double().cpu().numpy()
    np.testing.assert_allclose(actual.get().astype(np.float64), host, rtol=scale, atol=scale)


def tensors(count, dtype, seed=0, special=True, shape=(40, 33)):
    """Return tensors with random numbers, and, of floats, all combinations of special ones."""
    generator = torch.Generator("cuda").manual_seed(seed)
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return [torch.rand(shape, device="cuda", generator=generator) > 0.5 for _ in range(count)]
    if not kind.is_floating_point and not kind.is_complex:
        return [
            torch.randint(0 if dtype == "uint8" else -5, 6, shape, device="cuda", generator=generator).to(kind)
            for _ in range(count)
        ]
    found = [
        (
            torch.randn(
                shape, device="cuda", generator=generator, dtype=torch.complex128 if kind.is_complex else torch.float64
            )
            * 2
        ).to(kind)
        for _ in range(count)
    ]
    if special and not kind.is_complex and count <= 2:
        for tensor, values in zip(found, zip(*itertools.product(SPECIAL, repeat=count), strict=True), strict=True):
            tensor.view(-1)[: len(values)] = torch.tensor(values, device="cuda").to(kind)
    return found


def theirs(name):
    for home in (torch, functional, torch.ops.aten):
        if hasattr(home, name):
            return getattr(home, name)
    raise AssertionError(name)


def operands_of(name):
    return sum(p.default is p.empty for p in inspect.signature(getattr(ops, name)).parameters.values())


ELEMENTWISE = [
    "abs",
    "add",
    "atan2",
    "ceil",
    "copysign",
    "cos",
    "div",
    "elu",
    "eq",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "fmod",
    "ge",
    "gelu",
    "gt",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "leaky_relu",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lt",
    "maximum",
    "minimum",
    "mul",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "relu",
    "remainder",
    "round",
    "rsqrt",
    "sigmoid",
    "sigmoid_backward",
    "sign",
    "silu",
    "silu_backward",
    "sin",
    "softplus",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
    "tanh_backward",
    "trunc",
    "gelu_backward",
    "addcdiv",
    "addcmul",
    "lerp",
]
LOOSE = {"pow", "tan", "gelu", "gelu_backward", "silu_backward", "softplus", "logaddexp", "lerp", "addcmul", "addcdiv",
         "remainder", "fmod", "floor_divide", "sigmoid_backward", "tanh_backward", "log1p", "expm1"}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name, dtype):
    inputs = tensors(operands_of(name), dtype)
    expected = theirs(name)(*inputs)
    actual = getattr(ops, name)(*map(ours, inputs))
    if name in LOOSE:  # their rounding of intermediate results in half types, and cancellation
        near(actual, expected, 50 if dtype in ("float32", "float64") else 4)
    else:
        close(actual, expected)


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
@pytest.mark.parametrize(
    "name",
    [
        "add",
        "mul",
        "maximum",
        "eq",
        "lt",
        "exp",
        "div",
        "abs",
        "bitwise_and",
        "bitwise_not",
        "logical_xor",
        "where",
        "clamp",
    ],
)
def test_elementwise_of_integers(name, dtype):
    if (name, dtype) in {("abs", "bool"), ("clamp", "bool")}:
        pytest.skip("neither of them takes booleans")
    if name == "where":
        mask, x, y = tensors(1, "bool") + tensors(2, dtype)
        return close(ops.where(ours(mask), ours(x), ours(y)), torch.where(mask, x, y))
    if name == "clamp":
        (x,) = tensors(1, dtype)
        return close(ops.clamp(ours(x), 1, 3), torch.clamp(x, 1, 3))
    inputs = tensors(operands_of(name), dtype)
    close(getattr(ops, name)(*map(ours, inputs)), theirs(name)(*inputs))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "abs", "exp", "conj", "neg", "sum", "mean"])
def test_complex(name, dtype):
    inputs = tensors(operands_of(name), dtype)
    expected = theirs(name)(*inputs)
    close(getattr(ops, name)(*map(ours, inputs)), expected.resolve_conj(), 20)


FUNCTIONS = ["cos", "exp2", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "pow", "reciprocal", "rsqrt", "sigmoid",
             "silu", "sin", "sqrt", "square", "std", "tan", "tanh", "var"]  # fmt: skip


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_complex_numbers(name, dtype):
    inputs = tensors(2 if name == "pow" else 1, dtype)
    dims = {"dim": 1} if name in ("logsumexp", "std", "var") else {}
    expected = theirs(name)(*inputs, **dims)
    actual = getattr(ops, name)(*map(ours, inputs), **dims)
    scale = 500 * TOLERANCES[dtype]
    np.testing.assert_allclose(actual.get(), expected.cpu().numpy(), rtol=scale, atol=scale)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", ["bitwise_left_shift", "bitwise_right_shift"])
def test_shifts_by_any_number_of_bits(name, dtype):
    (numbers,) = tensors(1, dtype, shape=(80,))
    bits = torch.arange(80, device="cuda").to(numbers.dtype) - (0 if dtype == "uint8" else 3)
    close(getattr(ops, name)(ours(numbers), ours(bits)), theirs(name)(numbers, bits))


@pytest.mark.parametrize("name", ["any", "all"])
def test_truth_over_no_dimensions(name):
    (x,) = tensors(1, "int32", shape=(3, 4))
    close(getattr(ops, name)(ours(x), dim=()), theirs(name)(x, dim=()))


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations_with_replacement(DTYPES + FP8, 2)))
def test_promotion(a, b):
    try:
        expected = str(torch.promote_types(getattr(torch, a), getattr(torch, b))).removeprefix("torch.")
    except RuntimeError:
        with pytest.raises(UsageError):
            cudatool.promote_types(dtype_of(a), dtype_of(b))
        return
    assert np.dtype(dtype_of(expected)) == cudatool.promote_types(dtype_of(a), dtype_of(b))


@pytest.mark.parametrize("a", DTYPES)
def test_result_type_with_numbers_and_arrays_without_dimensions(a):
    tensor = torch.ones(2, device="cuda").to(getattr(torch, a))
    array = cudatool.ones(2, dtype_of(a))
    for number in (True, 2, 2.5, 1j):
        expected = str(torch.result_type(tensor, number)).removeprefix("torch.").replace("complex32", "complex64")
        assert np.dtype(dtype_of(expected)) == cudatool.result_type(array, number), number
    for b in DTYPES:
        scalar = torch.ones((), device="cuda").to(getattr(torch, b))
        expected = str(torch.result_type(tensor, scalar)).replace("complex32", "complex64")  # which NumPy does not have
        assert np.dtype(dtype_of(expected.removeprefix("torch."))) == cudatool.result_type(
            array, cudatool.ones((), dtype_of(b))
        ), b
        assert torch.can_cast(getattr(torch, a), getattr(torch, b)) == cudatool.can_cast(dtype_of(a), dtype_of(b)), b


@pytest.mark.parametrize("target", FLOATS + FP8)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
def test_casts_have_the_same_bits(source, target):
    rng = np.random.default_rng(1)
    values = np.r_[
        SPECIAL,
        447,
        448,
        464,
        465,
        480,
        57344,
        61440,
        65504,
        rng.standard_normal(5000) * 10.0 ** rng.integers(-10, 6, 5000),
    ]
    if target == "float8_e4m3fn":  # what is beyond its range is NaN for ml_dtypes; PyTorch's versions differ
        values = values[~(abs(values) > 464)]
    tensor = torch.tensor(values, device="cuda").to(getattr(torch, source))
    expected = tensor.to(getattr(torch, target)).float().cpu().numpy()
    actual = ours(tensor).to(dtype_of(target)).to(np.float32).get()
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[expected == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "name", ["sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "std", "var", "norm", "logsumexp", "any", "all"]
)
def test_reductions(name, dtype):
    (x,) = tensors(1, dtype, special=False, shape=(5, 37, 64))
    array = ours(x)
    for dim in (0, 1, 2) if name in ("prod", "logsumexp") else (None, 0, 1, 2):
        expected = theirs(name)(x) if dim is None else theirs(name)(x, dim=dim)
        near(getattr(ops, name)(array, dim=dim), expected, 30)


@pytest.mark.parametrize("shape", [(1 << 20,), (3, 1 << 18), (1 << 18, 3), (4099, 513)])
def test_large_sums(shape):
    x = torch.randn(shape, device="cuda")
    for dim in (None, 0, -1):
        exact = x.double().sum() if dim is None else x.double().sum(dim)
        np.testing.assert_allclose(ops.sum(cudatool.asarray(x), dim).get(), exact.cpu().numpy(), rtol=1e-5, atol=2e-3)


def test_nan_and_ties_have_the_same_places():
    x = torch.tensor([[1, 3, 3, 2], [1, float("nan"), 5, float("nan")], [float("-inf")] * 4], device="cuda")
    array = cudatool.asarray(x)
    for name in ("argmax", "argmin", "amax", "amin"):
        close(getattr(ops, name)(array, dim=1), theirs(name)(x, dim=1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [7, 64, 1000, 5000])
def test_softmax_and_its_gradient(dtype, columns):
    (x,) = tensors(1, dtype, special=False, shape=(6, columns))
    for name in ("softmax", "log_softmax"):
        source = x.clone().requires_grad_()
        y = getattr(functional, name)(source, -1)
        g = torch.randn_like(y)
        y.backward(g)
        output = getattr(ops, name)(ours(x), -1)
        close(output, y, 8)
        near(getattr(ops, f"{name}_backward")(ours(g), ours(y), -1), source.grad)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm_and_its_gradients(dtype):
    x, g = tensors(2, dtype, special=False, shape=(50, 96))
    w, b = tensors(2, dtype, seed=1, special=False, shape=(96,))
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    functional.layer_norm(leaves[0], (96,), leaves[1], leaves[2]).backward(g)
    out, mean, rstd = ops.native_layer_norm(ours(x), (96,), ours(w), ours(b), 1e-5)
    near(out, functional.layer_norm(x, (96,), w, b))
    for actual, leaf in zip(
        ops.native_layer_norm_backward(ours(g), ours(x), (96,), mean, rstd, ours(w), ours(b)), leaves, strict=True
    ):
        near(actual, leaf.grad)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_and_its_gradient(dtype, reduction, smoothing):
    (x,) = tensors(1, dtype, special=False, shape=(40, 130))
    target = torch.randint(0, 130, (40,), device="cuda")
    target[::7] = -100
    leaf = x.clone().requires_grad_()
    loss = functional.cross_entropy(leaf, target, reduction=reduction, label_smoothing=smoothing)
    g = torch.rand_like(loss)
    loss.backward(g)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    near(ops.cross_entropy(ours(x), ours(target), **options), loss)
    near(ops.cross_entropy_backward(ours(g), ours(x), ours(target), **options), leaf.grad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_embedding_and_its_gradient(dtype):
    (weight,) = tensors(1, dtype, special=False, shape=(300, 70))
    index = torch.randint(0, 300, (17, 40), device="cuda")
    leaf = weight.clone().requires_grad_()
    out = functional.embedding(index, leaf)
    g = torch.randn_like(out)
    out.backward(g)
    close(ops.embedding(ours(index), ours(weight)), out)
    near(ops.embedding_dense_backward(ours(g), ours(index), 300), leaf.grad)


def test_shapes_joined_and_cut():
    a, b = tensors(2, "float32", special=False)
    close(ops.cat([ours(a), ours(b)], 1), torch.cat([a, b], 1))
    close(ops.stack([ours(a), ours(b)], 2), torch.stack([a, b], 2))
    for diagonal in (-2, 0, 3):
        close(ops.tril(ours(a), diagonal), torch.tril(a, diagonal))
        close(ops.triu(ours(a), diagonal), torch.triu(a, diagonal))
    for arguments in ((10,), (2, 9, 3), (0.0, 1.0, 0.1)):
        close(ops.arange(*arguments), torch.arange(*arguments, device="cuda"))
    index = torch.tensor([3, 0, 3], device="cuda")
    close(ops.index_select(ours(a), 1, ours(index)), torch.index_select(a, 1, index))
    close(
        ops.index_add(ours(a), 0, ours(index), ours(b[:3]), alpha=2), torch.index_add(a, 0, index, b[:3], alpha=2), 10
    )


def test_large_arrays_of_every_alignment():
    x = torch.randn(1 << 22, device="cuda")
    array = cudatool.asarray(x)
    for start in (0, 1, 2, 4):
        close(ops.add(array[start:], array[: array.size - start]), x[start:] + x[: x.numel() - start])
    square = x.reshape(2048, 2048)
    close(ops.mul(array.reshape(2048, 2048).T, array.reshape(2048, 2048)), square.T * square)
    close(ops.add(array.reshape(2048, 2048), array[:2048]), square + x[:2048])


def test_bfloat16_is_shared_with_pytorch():
    array = cudatool.full((3, 4), 1.5, cudatool.bfloat16)
    tensor = torch.from_dlpack(array[:, 1:])
    assert (torch.bfloat16, array[:, 1:].data_ptr()) == (tensor.dtype, tensor.data_ptr())
    tensor += 1
    assert (cudatool.from_dlpack(tensor).get() == 2.5).all()


def test_jiterator_gives_what_theirs_gives():
    source = "template <typename T> T mixed(T x, T y, T alpha) { return -x + alpha * y * ::exp(x); }"
    from torch.cuda.jiterator import _create_jit_fn

    for a, b in (("float32", "float32"), ("float16", "float32"), ("int32", "float64")):
        (x,), (y,) = tensors(1, a, special=False), tensors(1, b, 1, special=False)
        expected = _create_jit_fn(source, alpha=1.0)(x, y, alpha=2.5)
        close(cudatool.jiterator.create_jit_fn(source, alpha=1.0)(ours(x), ours(y), alpha=2.5), expected, 20)
