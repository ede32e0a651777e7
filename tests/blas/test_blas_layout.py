"""How cuBLAS is told about strided matrices: decisions only, tried out with NumPy in cuBLAS's place."""

from __future__ import annotations

import numpy as np
import pytest
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.blas._layout import Matrix, arrange

N, T, C = 0, 1, 2


def plan(a, b, out, conjugate=(False, False), **options):
    return arrange(a.shape, a.strides, b.shape, b.strides, out.strides, a.itemsize, out.itemsize, conjugate, **options)


def read(buffer: np.ndarray, rows: int, columns: int, matrix: Matrix, batch: int) -> np.ndarray:
    """Return op(matrix) of shape (rows, columns) as cuBLAS would read it from the elements of `buffer`."""
    if matrix.operation != N:
        rows, columns = columns, rows
    assert matrix.leading >= max(rows, 1)  # cuBLAS refuses anything else
    size = buffer.itemsize
    strides = (matrix.step * size, size, matrix.leading * size)
    columns_of = np.lib.stride_tricks.as_strided(buffer, (batch, rows, columns), strides)
    if matrix.operation != N:
        columns_of = columns_of.swapaxes(-1, -2)
    return columns_of.conj() if matrix.operation == C else columns_of


def lying(array: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Return the elements that cuBLAS is pointed to: the array's, or those of a copy as it was asked for."""
    if not matrix.copy:
        return array
    source = array[:1] if array.ndim == 3 and not array.strides[0] else array
    copy = np.ascontiguousarray(source if matrix.copy == "rows" else source.swapaxes(-1, -2))
    return copy


def computed(a, b, out, conjugate=(False, False)) -> np.ndarray:
    """Return the product as cuBLAS would compute it from what it is told; `out` is written where it is not copied."""
    found = plan(a, b, out, conjugate)
    left, right = (b, a) if found.swapped else (a, b)
    first, second = (found.b, found.a) if found.swapped else (found.a, found.b)
    x = read(lying(left, first), found.m, found.k, first, found.batch)
    y = read(lying(right, second), found.k, found.n, second, found.batch)
    place = np.empty(out.shape, out.dtype) if found.out.copy else out
    read(place, found.m, found.n, found.out, found.batch)[...] = x @ y
    return place


LAYOUTS = {
    "rows": lambda a: a,
    "columns": lambda a: np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2),
    "padded": lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 3)])[..., :-3],
    "stepped": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: np.ascontiguousarray(a[..., ::-1, :])[..., ::-1, :],
}
layouts = st.sampled_from(sorted(LAYOUTS))
extent = st.integers(1, 4)


@given(extent, extent, extent, st.integers(0, 3), st.tuples(layouts, layouts, layouts), st.booleans(), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_cublas_reads_and_writes_what_is_meant(m, n, k, batch, how, conjugate_a, conjugate_b):
    random = np.random.default_rng(1)
    front = (batch,) if batch else ()
    a, b, out = (
        LAYOUTS[layout](random.integers(-3, 4, shape) + 1j * random.integers(-3, 4, shape))
        for layout, shape in zip(how, [(*front, m, k), (*front, k, n), (*front, m, n)], strict=True)
    )
    found = computed(a, b, out, (conjugate_a, conjugate_b))
    np.testing.assert_array_equal((a.conj() if conjugate_a else a) @ (b.conj() if conjugate_b else b), found)


A, B, OUT = np.zeros((4, 6), "f4"), np.zeros((6, 5), "f4"), np.zeros((4, 5), "f4")


def test_rows_are_read_as_they_lie_and_the_operands_change_places():
    found = plan(A, B, OUT)
    assert (found.m, found.n, found.k, found.batch, found.swapped) == (5, 4, 6, 1, True)
    assert (found.a, found.b, found.out) == (Matrix(N, 6, 0), Matrix(N, 5, 0), Matrix(N, 5, 0))


def test_transposed_operands_are_read_so():
    found = plan(A.reshape(6, 4).T, B.reshape(5, 6).T, OUT)
    assert (found.a, found.b) == (Matrix(T, 4, 0), Matrix(T, 6, 0))


def test_a_result_in_columns_needs_no_copy():
    found = plan(A, B, OUT.reshape(5, 4).T)
    assert (found.m, found.n, found.swapped, found.out) == (4, 5, False, Matrix(N, 4, 0))
    assert (found.a.operation, found.b.operation) == (T, T)


def test_an_epilogue_wants_rows():
    found = plan(A, B, OUT.reshape(5, 4).T, rows=True)
    assert (found.swapped, found.out) == (True, Matrix(N, 5, 20, copy="rows"))


def test_conjugated_and_transposed_is_one_operation():
    found = plan(A.reshape(6, 4).T, B, OUT, (True, False))
    assert found.a == Matrix(C, 4, 0)


def test_what_is_only_conjugated_is_copied_in_columns():
    found = plan(A, B, OUT, (True, False))
    assert found.a == Matrix(C, 4, 0, copy="columns")


def test_parts_of_larger_matrices_are_read_in_place():
    found = plan(np.zeros((9, 11), "f4")[1:5, 2:8], B, OUT)
    assert found.a == Matrix(N, 11, 0)


@pytest.mark.parametrize(
    "a",
    [A.repeat(2, 1)[:, ::2], A[::-1], np.broadcast_to(A[:1], A.shape), np.zeros((4, 25), "u1")[:, :24].view("f4")],
    ids=["steps", "backwards", "repeated rows", "rows between elements"],
)
def test_what_cublas_cannot_read_is_copied(a):
    assert plan(a, B, OUT).a == Matrix(N, 6, 0, copy="rows")


def test_a_vector_with_gaps_is_a_matrix_of_one_element_a_line():
    vector = np.zeros(18, "f4")[::3]
    assert plan(vector[None], B, OUT[:1]).a == Matrix(T, 3, 0)


def test_a_batch_of_one_matrix_has_no_step():
    repeated = np.broadcast_to(A, (3, 4, 6))
    found = plan(repeated, np.zeros((3, 6, 5), "f4"), np.zeros((3, 4, 5), "f4"))
    assert (found.a, found.b, found.batch) == (Matrix(N, 6, 0), Matrix(N, 5, 30), 3)
    assert plan(repeated[:, ::-1], np.zeros((3, 6, 5), "f4"), np.zeros((3, 4, 5), "f4")).a == Matrix(N, 6, 0, "rows")


def test_a_result_that_overlaps_itself_is_computed_elsewhere():
    out = np.lib.stride_tricks.as_strided(OUT, (3, 4, 5), (0, 20, 4))
    assert plan(np.zeros((3, 4, 6), "f4"), np.zeros((3, 6, 5), "f4"), out).out.copy == "rows"


def test_eight_bit_operands_are_contiguous_along_the_sums():
    a, b, out = np.zeros((16, 32), "i1"), np.zeros((32, 16), "i1"), np.zeros((16, 16), "f2")
    assert plan(a, b, out, contracted=True).b == Matrix(T, 32, 0, copy="columns")
    assert plan(a, b.reshape(16, 32).T, out, contracted=True)[4:6] == (Matrix(N, 32, 0), Matrix(T, 32, 0))


def test_numbers_beyond_32_bits_are_seen():
    assert not arrange((2, 4), (16, 4), (4, 2), (8, 4), (8, 4), 4, 4).wide
    assert arrange((2, 4), (1 << 40, 4), (4, 2), (8, 4), (8, 4), 4, 4).wide
