"""Operations of neural networks, and their gradients, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool import ops
from cudatool.errors import UsageError

RNG = np.random.default_rng(8)
X = RNG.standard_normal((3, 5, 12))
G = RNG.standard_normal((3, 5, 12))


def device(host, dtype=np.float32):
    return cudatool.asarray(host.astype(dtype))


def close(actual, expected, tolerance=2e-6):
    assert np.shape(expected) == actual.shape
    np.testing.assert_allclose(actual.get().astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_and_its_gradient(dim):
    y = softmax(X, dim)
    close(ops.softmax(device(X), dim), y)
    close(ops.softmax_backward(device(G), device(y), dim), y * (G - (G * y).sum(dim, keepdims=True)))


@pytest.mark.parametrize("dim", [0, -1])
def test_log_softmax_and_its_gradient(dim):
    y = softmax(X, dim)
    close(ops.log_softmax(device(X), dim), np.log(y))
    close(ops.log_softmax_backward(device(G), device(np.log(y)), dim), G - y * G.sum(dim, keepdims=True))


@pytest.mark.parametrize("columns", [1, 3, 255, 1028, 3001])
def test_softmax_of_rows_of_all_sizes(columns):
    x = np.random.default_rng(9).standard_normal((3, columns))
    close(ops.softmax(device(x), -1), softmax(x, -1))


def test_softmax_is_computed_in_float32_and_returned_as_asked():
    x = device(X * 10, cudatool.bfloat16)
    expected = softmax(x.get().astype(np.float64), -1)
    close(ops.softmax(x, -1, dtype=np.float32), expected)
    half = ops.softmax(x, -1)
    assert np.dtype(cudatool.bfloat16) == half.dtype
    close(half, expected, 4e-3)


def test_softmax_of_masked_scores():
    x = np.array([[1, -np.inf, 3], [-np.inf, -np.inf, 0], [1e30, 1e30, -1e30]])
    close(ops.softmax(device(x), -1), softmax(x, -1))
    assert np.isnan(ops.softmax(device(np.full((1, 4), -np.inf)), -1).get()).all()


@pytest.mark.parametrize("parameters", [True, False])
def test_layer_norm_and_its_gradients(parameters):
    w, b = RNG.standard_normal((2, 12)) if parameters else (np.ones(12), np.zeros(12))
    weight, bias = (device(w), device(b)) if parameters else (None, None)
    x, g = device(X), device(G)
    mean, scale = X.mean(-1, keepdims=True), 1 / np.sqrt(X.var(-1, keepdims=True) + 1e-5)
    normal = (X - mean) * scale
    close(ops.layer_norm(x, (12,), weight, bias), normal * w + b, 1e-5)

    out, means, scales = ops.native_layer_norm(x, (12,), weight, bias, 1e-5)
    close(out, normal * w + b, 1e-5)
    close(means, mean)
    close(scales, scale)
    dx, dw, db = ops.native_layer_norm_backward(g, x, (12,), means, scales, weight, bias)
    gw = G * w
    slope = gw - gw.mean(-1, keepdims=True) - normal * (gw * normal).mean(-1, keepdims=True)
    close(dx, slope * scale, 1e-5)
    close(dw, (G * normal).sum((0, 1)), 1e-5)
    close(db, G.sum((0, 1)), 1e-5)


def test_layer_norm_over_several_dimensions():
    close(
        ops.layer_norm(device(X), (5, 12)),
        (X - X.mean((1, 2), keepdims=True)) / np.sqrt(X.var((1, 2), keepdims=True) + 1e-5),
        1e-5,
    )
    dx, dw, _ = ops.native_layer_norm_backward(
        device(G), device(X), (5, 12), *ops.native_layer_norm(device(X), (5, 12), None, None, 1e-5)[1:],
        output_mask=(False, True, False),
    )  # fmt: skip
    assert dx is None
    assert (5, 12) == dw.shape


def test_gradients_of_many_rows_are_added_up_by_many_blocks():
    x, g = RNG.standard_normal((2, 700, 9))
    _, means, scales = ops.native_layer_norm(device(x), (9,), None, None, 1e-5)
    _, dw, db = ops.native_layer_norm_backward(device(g), device(x), (9,), means, scales)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    close(dw, (g * normal).sum(0), 1e-4)
    close(db, g.sum(0), 1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_and_its_gradient(reduction, smoothing):
    scores, target = X.reshape(15, 12), np.arange(15) % 12
    target[[3, 7]] = -100  # ignored
    counted = target >= 0
    wanted = np.eye(12)[np.maximum(target, 0)] * (1 - smoothing) + smoothing / 12
    losses = -(wanted * np.log(softmax(scores, -1))).sum(-1) * counted
    x, t = device(scores), cudatool.asarray(target)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    expected = {"mean": losses.sum() / 13, "sum": losses.sum(), "none": losses}[reduction]
    close(ops.cross_entropy(x, t, **options), expected)

    gradient = (softmax(scores, -1) - wanted) * counted[:, None] / (13 if reduction == "mean" else 1)
    outer = np.arange(15.0) if reduction == "none" else np.array(2.0)
    actual = ops.cross_entropy_backward(device(outer), x, t, **options)
    close(actual, gradient * (outer[:, None] if reduction == "none" else 2))


def test_cross_entropy_of_half_scores_and_other_targets():
    scores, target = X.reshape(15, 12), np.arange(15) % 12
    x = device(scores, np.float16)
    loss = ops.cross_entropy(x, cudatool.asarray(target.astype(np.int32)), ignore_index=5)
    expected = -np.log(softmax(scores, -1))[np.arange(15), target][target != 5].mean()
    assert np.float16 == loss.dtype
    close(loss, expected, 2e-3)
    gradient = ops.cross_entropy_backward(1.0, x, cudatool.asarray(target), ignore_index=5)
    assert np.float16 == gradient.dtype
    assert not gradient.get()[target == 5].any()


def test_cross_entropy_of_ignored_rows_alone_is_not_a_number():
    loss = ops.cross_entropy(cudatool.zeros((2, 3)), cudatool.full(2, -100, np.int64))
    assert np.isnan(float(loss))


def test_embedding_and_its_gradient():
    weight, indices = RNG.standard_normal((70, 6)), RNG.integers(0, 70, (20, 30))
    indices[0] = 3
    w, i = device(weight), cudatool.asarray(indices)
    close(ops.embedding(i, w), weight.astype(np.float32)[indices])
    gradient = RNG.standard_normal((20, 30, 6))
    expected = np.zeros((70, 6))
    np.add.at(expected, indices, gradient)
    actual = ops.embedding_dense_backward(device(gradient), i, 70)
    close(actual, expected, 1e-5)
    assert actual.get().tobytes() == ops.embedding_dense_backward(device(gradient), i, 70).get().tobytes()
    padded = ops.embedding_dense_backward(device(gradient), i, 70, padding_idx=3).get()
    assert not padded[3].any() and padded[4].any()
    half = ops.embedding_dense_backward(device(np.ones((600, 6)), np.float16), cudatool.zeros(600, np.int32), 2)
    assert ([600, 0], np.float16) == (half.get()[:, 0].tolist(), half.dtype)


@pytest.mark.parametrize("dtype", [np.float32, cudatool.bfloat16, np.int8])
def test_index_select_along_any_dimension(dtype):
    host = np.arange(60).reshape(3, 4, 5).astype(dtype)
    index = cudatool.asarray(np.array([2, 0, 2, 1], np.int32))
    for dim in (0, 1, -1):
        np.testing.assert_array_equal(
            ops.index_select(cudatool.asarray(host), dim, index).get(), host.take([2, 0, 2, 1], dim)
        )


@pytest.mark.parametrize("rows", [1, 7, 1024, 1025, 1100])  # up to 1,024 rows have a block each
def test_parts_of_many_rows_are_added_in_their_order(rows):
    random = np.random.default_rng(rows)
    host, parts = random.random((rows, 3), np.float32), random.random((600, 3), np.float32)
    index = random.integers(0, rows, 600)
    expected = host.copy()
    for row, part in zip(index, parts, strict=True):
        expected[row] += part
    actual = ops.index_add(device(host), 0, cudatool.asarray(index), device(parts))
    np.testing.assert_array_equal(expected, actual.get())


def test_index_add_along_any_dimension():
    host, source = X[:, :4], X[:, 1:]
    index = np.array([3, 0, 3, 1])
    expected = host.copy()
    np.add.at(expected, (slice(None), index), 2 * source)
    actual = ops.index_add(device(host), 1, cudatool.asarray(index), device(source), alpha=2)
    close(actual, expected, 1e-5)


def test_one_hot():
    index = np.array([[1, 0], [2, 1]])
    actual = ops.one_hot(cudatool.asarray(index), 3)
    np.testing.assert_array_equal(actual.get(), np.eye(3, dtype=np.int64)[index])


def test_cat_and_stack():
    a, b = np.arange(6).reshape(2, 3), np.arange(6.0).reshape(2, 3).astype(np.float32)
    x, y = cudatool.asarray(a), cudatool.asarray(b)
    for dim in (0, 1, -1):
        joined = ops.cat([x, y, y], dim)
        assert np.float32 == joined.dtype
        np.testing.assert_array_equal(joined.get(), np.concatenate([a, b, b], dim))
        np.testing.assert_array_equal(ops.stack([x, y], dim).get(), np.stack([a, b], dim))
    out = cudatool.zeros((4, 3), np.float64)
    assert out is ops.cat([x, y], out=out)
    np.testing.assert_array_equal(out.get(), np.concatenate([a, b]))


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [((5,), np.int64), ((2, 11, 3), np.int64), ((5, 0, -2), np.int64), ((0, 1, 0.3), np.float32), ((3, 3), np.int64)],
)
def test_arange(arguments, dtype):
    actual = ops.arange(*arguments)
    assert dtype == actual.dtype
    np.testing.assert_allclose(actual.get(), np.arange(*arguments), rtol=1e-6)
    assert np.float16 == ops.arange(*arguments, dtype=np.float16).dtype


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.softmax(x.to(np.int32), 0), "softmax takes arrays of floats"),
        (lambda x: ops.softmax(x, 2), "dim=2 does not fit"),
        (lambda x: ops.softmax_backward(x, x[0], 0), "have different shapes"),
        (lambda x: ops.layer_norm(x, (4,)), r"\(4,\) are not the last dimensions of shape \(2, 3\)"),
        (lambda x: ops.layer_norm(x, (3,), x), r"weight must be floats of shape \(3,\)"),
        (
            lambda x: ops.native_layer_norm_backward(x, x, (3,), cudatool.zeros(1), cudatool.zeros(2)),
            "mean must have one number for each of 2 rows, not 1",
        ),
        (
            lambda x: ops.native_layer_norm_backward(x, x, (3,), cudatool.zeros(2), cudatool.zeros(2, np.float64)),
            "rstd must be float32",
        ),
        (lambda x: ops.cross_entropy(x[0], x), r"floats of shape \(rows, classes\)"),
        (lambda x: ops.cross_entropy(x, x[:, 0]), r"target must be integers of shape \(2,\)"),
        (lambda x: ops.cross_entropy(x, cudatool.zeros(2, int), reduction="max"), "reduction must be 'mean'"),
        (lambda x: ops.cross_entropy(x, cudatool.zeros(2, int), label_smoothing=2), "label_smoothing must be between"),
        (lambda x: ops.cross_entropy_backward(x, x, cudatool.zeros(2, int)), r"gradient must have shape \(\)"),
        (lambda x: ops.embedding(x, x), "indices that are integers"),
        (lambda x: ops.embedding(cudatool.zeros(2, int), x[0]), r"weight of shape \(rows, columns\)"),
        (lambda x: ops.index_select(x, 0, x.astype(np.int64)), "indices of one dimension"),
        (lambda x: ops.index_select(x, 5, cudatool.zeros(2, int)), "there is no dimension 5"),
        (lambda x: ops.cat([x, x[:, :1]], 0), "needs shapes that differ only there"),
        (lambda x: ops.cat([]), "a list of arrays, at least one"),
        (lambda x: ops.stack([x, x[:1]]), "arrays of one shape"),
        (lambda x: ops.cat([x, x], out=x), r"of shape \(4, 3\)"),
        (lambda x: ops.arange(0, 5, -1), "never ends by steps of -1"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(cudatool.zeros((2, 3)))


def test_rows_with_infinity_have_no_softmax():
    x = device(np.array([[1, np.inf, 2], [np.inf, np.inf, 0], [0, -np.inf, 0]]))
    nan = np.full(3, np.nan)
    close(ops.softmax(x, -1), np.array([nan, nan, [0.5, 0, 0.5]]))


def test_indices_from_the_end_are_not_taken_for_the_padding():
    gradient = ops.embedding_dense_backward(device(np.ones((2, 3))), device(np.array([1, 0]), np.int64), 2, 1)
    close(gradient, [[1, 1, 1], [0, 0, 0]])
    program = """
import numpy as np, cudatool
from cudatool import ops
ops.index_add(cudatool.zeros((4, 2)), 0, cudatool.asarray(np.array([-1])), cudatool.ones((1, 2)))
cudatool.synchronize()
"""
    done = run_python(program)
    assert done.returncode == 1
    assert "CudaError" in done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.cross_entropy(x[:, :0], device(np.zeros(3), np.int64)), "no classes"),
        (lambda x: ops.cat([x, x], out=cudatool.zeros((6, 4), np.int32)), "not put into an array of int32"),
        (lambda x: ops.cat([x, x], out=cudatool.zeros((5, 4))), "shape"),
        (lambda x: ops.one_hot(x, 3), "integers"),
    ],
)
def test_results_that_cannot_be_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(cudatool.ones((3, 4)))


def test_softmax_is_along_one_dimension():
    for dim in (None, (0, 1)):
        with pytest.raises(UsageError, match="dim must be a whole number"):
            ops.softmax(cudatool.ones((3, 4)), dim)


def test_softmax_of_integers_needs_a_dtype():
    array = cudatool.asarray([1, 2, 3])
    expected = np.exp([1, 2, 3]) / np.exp([1, 2, 3]).sum()
    np.testing.assert_allclose(ops.softmax(array, 0, dtype=np.float32).get(), expected, rtol=1e-6)
    np.testing.assert_allclose(ops.log_softmax(array, 0, dtype=np.float64).get(), np.log(expected), rtol=1e-14)
    with pytest.raises(UsageError, match="takes arrays of floats"):
        ops.softmax(array, 0)


def test_rows_of_one_element():
    one, first = cudatool.asarray(np.float32(7)), cudatool.asarray([0])
    for index in (first, first.reshape(())):
        assert ops.index_select(one, 0, index).get() == np.float32(7)
        assert ops.index_add(one, -1, index, one, alpha=2).get() == np.float32(21)
    rows = cudatool.asarray(np.arange(6.0).reshape(2, 3))
    assert ops.index_select(rows, 1, cudatool.asarray(np.int64(2))).get().tolist() == [[2], [5]]


def test_nothing_can_be_added_to_nothing():
    rows, index = cudatool.empty((3, 0)), cudatool.empty(0, np.int64)
    assert ops.index_add(rows, 1, index, rows).shape == (3, 0)


def test_cat_leaves_out_arrays_of_no_elements_and_one_dimension():
    rows = cudatool.asarray(np.ones((2, 2), np.float32))
    found = ops.cat([cudatool.empty(0, np.float64), rows], 1)
    assert (found.dtype, found.shape) == (np.float64, (2, 2))
    assert ops.cat([cudatool.empty(0), cudatool.empty(0)]).shape == (0,)


def test_one_hot_finds_out_how_many_classes_there_are():
    assert ops.one_hot(cudatool.asarray([2, 0])).get().tolist() == [[0, 0, 1], [1, 0, 0]]


def test_arange_of_integers_is_of_whole_parts():
    assert ops.arange(0.1, dtype=np.int64).shape == (0,)
    assert ops.arange(1.9, 4.9, 1.5, dtype=np.int64).get().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: ops.arange(float("inf")), "finite numbers, not inf"),
        (lambda a: ops.arange("3"), "step must be a real number, not '3'"),
        (lambda a: ops.arange(0, 3, 0.5, dtype=np.int64), "by steps of 0"),
        (lambda a: ops.one_hot(a, -2), "cannot be -2 classes"),
        (lambda a: ops.one_hot(a[:0]), "of no elements"),
        (lambda a: ops.one_hot([1]), "takes a DeviceArray, not list"),
        (lambda a: ops.cat([a, [1]]), "takes a DeviceArray, not list"),
        (lambda a: ops.index_select(a, 0, 1), "indices that are integers"),
        (lambda a: ops.index_add(a, 0, a, a, alpha=0.5), "alpha must be a number that int64"),
        (lambda a: ops.index_add(a, 0, a, a.reshape(1, 3)), "as many dimensions"),
        (lambda a: ops.embedding(a, np.ones((2, 2))), "takes a DeviceArray, not ndarray"),
        (lambda a: ops.embedding([0], a.reshape(1, 3)), "indices that are integers"),
        (lambda a: ops.embedding_dense_backward(a.reshape(3, 1), [0, 1, 2], 3), "indices that are integers"),
    ],
)
def test_indices_and_numbers_that_do_not_fit_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(cudatool.asarray([0, 1, 2]))
