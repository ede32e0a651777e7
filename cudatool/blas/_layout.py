"""How cuBLAS sees a product of strided matrices. Decisions only: nothing here touches a device.

cuBLAS thinks in columns: a matrix is columns of adjacent elements, `leading` elements from one to the next. A matrix
of ours with contiguous rows is therefore its own transpose to cuBLAS, and one with contiguous columns is itself::

    out has contiguous rows:      cuBLAS computes  out' = b' a'
    out has contiguous columns:   cuBLAS computes  out  = a b

and each operand is read as it lies (N), transposed (T), or transposed and conjugated (C). There is no "conjugated
only", so such an operand is copied, with its rows as columns; then it is C.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

__all__ = ["COLUMN_MAJOR", "ROW_MAJOR", "Matrix", "Order", "Product", "arrange"]

Order = str
"""Which lines of a matrix are contiguous: ``"rows"`` or ``"columns"``."""

ROW_MAJOR: Final = "rows"
COLUMN_MAJOR: Final = "columns"
_N, _T, _C = 0, 1, 2  # cublasOperation_t
_INT32_END: Final = 1 << 31


class Matrix(NamedTuple):
    """A matrix, or a batch of them, as cuBLAS gets it; distances are in elements.

    Attributes
    ----------
    operation
        cublasOperation_t.
    leading
        From one contiguous line to the next.
    step
        From one matrix of the batch to the next.
    copy
        How a copy must be ordered that takes its place, ``""`` if it can be used as it lies. The other fields are
        the copy's.
    """

    operation: int
    leading: int
    step: int
    copy: Order = ""


class Product(NamedTuple):
    """A product as cuBLAS computes it: an `m` by `n` result in columns, sums over `k`."""

    m: int
    n: int
    k: int
    batch: int
    a: Matrix
    b: Matrix
    out: Matrix
    swapped: bool
    """Whether cuBLAS's left operand is our `b`."""
    wide: bool
    """Whether a number does not fit in 32 bits."""


@functools.lru_cache(maxsize=8192)
def arrange(
    a: tuple[int, ...],
    a_strides: tuple[int, ...],
    b: tuple[int, ...],
    b_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    itemsize: int,
    out_itemsize: int,
    conjugate: tuple[bool, bool] = (False, False),
    rows: bool = False,
    contracted: bool = False,
) -> Product:
    """Decide how cuBLAS computes ``out = a @ b``.

    Parameters
    ----------
    a, b
        Shapes, ``(m, k)`` and ``(k, n)``, or both with the same batch in front.
    a_strides, b_strides, out_strides
        In bytes.
    itemsize, out_itemsize
        Bytes of an element of the operands, and of the result.
    conjugate
        Whether `a` and `b` are to be conjugated.
    rows
        The result's rows must be contiguous: an epilogue goes along them.
    contracted
        Both operands must be contiguous along the sums, as cuBLASLt wants 8-bit elements.
    """
    batch = a[0] if len(a) == 3 else 1
    (m, k), n = a[-2:], b[-1]
    out = _lines((m, n), out_strides, out_itemsize, batch, written=True)
    by_rows = rows or out.get(COLUMN_MAJOR) is None or out.get(ROW_MAJOR) is not None
    order = ROW_MAJOR if by_rows else COLUMN_MAJOR
    result = out.get(order)
    if result is None:
        result = Matrix(_N, max(n, 1), m * n, copy=ROW_MAJOR)
    # What is read as it lies: to cuBLAS our rows are columns of the transpose, and b' and a' are what it wants.
    plain = ROW_MAJOR if by_rows else COLUMN_MAJOR
    wanted = (ROW_MAJOR, COLUMN_MAJOR) if contracted else (None, None)
    left = _operand(a[-2:], a_strides, itemsize, batch, plain, wanted[0], conjugate[0])
    right = _operand(b[-2:], b_strides, itemsize, batch, plain, wanted[1], conjugate[1])
    if by_rows:
        m, n = n, m
    numbers = (m, n, k, batch, left.leading, right.leading, result.leading)
    return Product(m, n, k, batch, left, right, result, by_rows, max(numbers) >= _INT32_END)


def _operand(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    batch: int,
    plain: Order,
    wanted: Order | None,
    conjugated: bool,
) -> Matrix:
    """Return an operand as cuBLAS gets it, where `plain` is the order that is read without transposing."""
    turned = COLUMN_MAJOR if plain == ROW_MAJOR else ROW_MAJOR
    orders = [turned] if conjugated else [plain, turned]
    if wanted is not None:
        orders = [wanted]
    found = _lines(shape, strides, itemsize, batch)
    rows, columns = shape
    for order in orders:
        if order in found:
            matrix = found[order]
            break
    else:
        order = orders[0]
        leading = columns if order == ROW_MAJOR else rows
        step = rows * columns if batch > 1 and strides[0] else 0  # a repeated matrix is copied once
        matrix = Matrix(_N, max(leading, 1), step, copy=order)
    operation = _N if order == plain else _C if conjugated else _T
    return matrix._replace(operation=operation)


def _lines(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, batch: int, *, written: bool = False
) -> dict[Order, Matrix]:
    """Return the orders in which lines of the matrix are contiguous and apart, as they lie."""
    step = 0
    if batch > 1:
        step, rest = divmod(strides[0], itemsize)
        if rest or step < written:
            return {}
    rows, columns = shape
    found = {}
    for order, count, length, distance, next_ in (
        (ROW_MAJOR, rows, columns, strides[-2], strides[-1]),
        (COLUMN_MAJOR, columns, rows, strides[-1], strides[-2]),
    ):
        if length > 1 and next_ != itemsize:
            continue
        leading, rest = divmod(distance, itemsize)
        if count <= 1:
            found[order] = Matrix(_N, max(length, 1), step)
        elif not rest and leading >= max(length, 1):
            found[order] = Matrix(_N, leading, step)
    return found
