from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cudatool
from cudatool import blas
from cudatool.errors import UsageError
from cudatool.trace.events import AccessFlag, Event, Kind, unpack_product

TOLERANCE = {"f4": 1e-5, "f8": 1e-12}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def device_view(host: Any, view: Any) -> cudatool.DeviceArray:
    return view(cudatool.asarray(host))


VIEWS = {
    "rows": (lambda a: a, lambda a: a),
    "columns": (
        lambda a: np.ascontiguousarray(np.swapaxes(a, -1, -2)),
        lambda a: a.transpose(*range(a.ndim - 2), -1, -2),
    ),
    "padded": (lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 3)]), lambda a: a[..., :-3]),
    "stepped": (lambda a: np.repeat(a, 2, axis=-1), lambda a: a[..., ::2]),
    "reversed": (lambda a: np.ascontiguousarray(a[..., ::-1, :]), lambda a: a[..., ::-1, :]),
}


@pytest.mark.parametrize("right", VIEWS)
@pytest.mark.parametrize("left", VIEWS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_product_of_any_strides(rng: np.random.Generator, dtype: str, left: str, right: str) -> None:
    a, b = rng.normal(size=(5, 7)).astype(dtype), rng.normal(size=(7, 4)).astype(dtype)
    operands = [device_view(VIEWS[name][0](array), VIEWS[name][1]) for name, array in ((left, a), (right, b))]
    np.testing.assert_allclose(cudatool.matmul(*operands).get(), a @ b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((3, 5, 7), (3, 7, 4)),
        ((1, 5, 7), (3, 7, 4)),
        ((5, 7), (3, 7, 4)),
        ((3, 5, 7), (7, 4)),
        ((1, 7), (7, 1)),
        ((5, 1), (1, 4)),
        ((1, 1), (1, 1)),
        ((0, 7), (7, 4)),
        ((5, 0), (0, 4)),
        ((2, 5, 0), (2, 0, 4)),
    ],
)
def test_shapes_and_batches(rng: np.random.Generator, a_shape: Any, b_shape: Any) -> None:
    a, b = rng.normal(size=a_shape), rng.normal(size=b_shape)
    found = cudatool.matmul(cudatool.asarray(a), cudatool.asarray(b))
    assert found.shape == (a @ b).shape
    np.testing.assert_allclose(found.get(), a @ b, atol=1e-12)


@pytest.mark.parametrize("view", [lambda c: c, lambda c: c.T, lambda c: c[:, ::2], lambda c: c[1:, :4]])
def test_result_goes_into_out(rng: np.random.Generator, view: Any) -> None:
    whole = np.zeros((8, 8))
    expected, out = view(whole), view(device := cudatool.asarray(whole))
    a, b = rng.normal(size=(expected.shape[0], 3)), rng.normal(size=(3, expected.shape[1]))
    assert cudatool.matmul(cudatool.asarray(a), cudatool.asarray(b), out=out) is out
    expected[...] = a @ b
    np.testing.assert_allclose(device.get(), whole, atol=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (((2, 3), "f4"), ((3, 2), "f8"), "float32 and float64"),
        (((2, 3), "i4"), ((3, 2), "i4"), "not int32"),
        (((2, 3), "f4"), ((2, 3), "f4"), "cannot multiply"),
        (((), "f4"), ((3, 2), "f4"), "cannot multiply"),
        (((2, 2, 3), "f4"), ((3, 3, 2), "f4"), "batches"),
    ],
)
def test_operands_that_do_not_fit_are_refused(a: Any, b: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cudatool.matmul(cudatool.zeros(*a), cudatool.zeros(*b))


def test_out_that_does_not_fit_is_refused() -> None:
    a = cudatool.zeros((3, 3))
    with pytest.raises(UsageError, match="out must have shape"):
        cudatool.matmul(a, a, out=cudatool.zeros((3, 4)))
    with pytest.raises(UsageError, match="overlaps"):
        cudatool.matmul(a, a, out=a)


def test_product_takes_its_turn_in_the_stream(rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(4, 4)), rng.normal(size=(4, 4))
    with cudatool.stream(cudatool.Stream()):
        left, right = cudatool.zeros((4, 4), np.float64), cudatool.asarray(b)
        left.copy_(cudatool.pin_memory(a), non_blocking=True)
        product = cudatool.matmul(left, right)
        left.fill_(0)
        np.testing.assert_allclose(product.get(), a @ b, atol=1e-12)


def test_operands_may_be_dropped_at_once(rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(64, 64)), rng.normal(size=(64, 64))
    product = cudatool.matmul(cudatool.asarray(a), cudatool.asarray(b))
    for _ in range(4):
        product = cudatool.matmul(product, cudatool.asarray(np.eye(64)))
    np.testing.assert_allclose(product.get(), a @ b, atol=1e-10)


@pytest.mark.parametrize("extents", [(2, 70_000, 3), (2, 3, 70_000), (70_000, 2, 3)])
def test_extents_of_a_product_are_recorded_whatever_their_size(
    events: list[Event], extents: tuple[int, int, int]
) -> None:
    m, n, k = extents
    cudatool.matmul(cudatool.zeros((m, k)), cudatool.zeros((k, n)))
    (gemm,) = (event for event in events if event.kind is Kind.GEMM)
    assert extents == unpack_product(gemm.aux0, gemm.aux1)


def test_product_and_what_it_touches_are_recorded(events: list[Event]) -> None:
    a, b = cudatool.zeros((4, 10))[:, :6], cudatool.zeros((5, 6)).T
    out = cudatool.empty((4, 5))
    events.clear()
    cudatool.matmul(a, b, out=out)
    gemm, *accesses = [event for event in events if event.kind in (Kind.GEMM, Kind.ACCESS)]
    assert (gemm.name, unpack_product(gemm.aux0, gemm.aux1)) == ("sgemm", (4, 5, 6))
    assert (gemm.address, gemm.size) == (out.data_ptr(), 80)
    assert {event.correlation for event in accesses} == {gemm.correlation}
    assert [(e.address, e.size, e.aux0, e.aux1, e.flags) for e in accesses] == [
        (a.data_ptr(), 24, 40, 4, AccessFlag.READ),
        (b.data_ptr(), 120, 0, 0, AccessFlag.READ),
        (out.data_ptr(), 80, 0, 0, AccessFlag.WRITE),
    ]


def test_batch_that_is_one_matrix_is_read_once(events: list[Event]) -> None:
    a, b = cudatool.zeros((1, 2, 3)), cudatool.zeros((4, 3, 2))
    events.clear()
    cudatool.matmul(a, b)
    reads = [event for event in events if event.kind is Kind.ACCESS and event.flags == AccessFlag.READ]
    assert sum(event.address == a.data_ptr() for event in reads) == 1
    assert len(reads) == 1 + 1


@pytest.mark.parametrize("factor", ["2", np.complex64(2j), 1j])
def test_factors_that_are_no_real_numbers_are_refused(factor):
    a = cudatool.ones((2, 2))
    with pytest.raises(UsageError, match="alpha and beta"):
        blas.addmm(a, a, a, alpha=factor)


def test_factors_in_device_memory_are_refused():
    a = cudatool.ones((2, 2))
    for name in ("addmm", "baddbmm", "addmv", "addmm_activation"):
        batch = a[None] if name == "baddbmm" else a
        right = a[0] if name == "addmv" else batch
        with pytest.raises(UsageError, match="numbers on the host"):
            getattr(blas, name)(right, batch, right, beta=cudatool.full((), 2.0))


def test_a_product_that_is_known_still_needs_the_dimensions_of_the_function():
    matrix, batch = cudatool.ones((4, 4)), cudatool.ones((2, 4, 4))
    blas.mm(matrix, matrix)
    blas.bmm(batch, batch)
    with pytest.raises(UsageError, match="bmm cannot multiply"):
        blas.bmm(matrix, matrix)
    with pytest.raises(UsageError, match="mm cannot multiply"):
        blas.mm(batch, batch)
