"""The product of two matrices in Triton's language. Only imported where Triton is installed."""

# Triton reads annotations as its own.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gemm"]


@triton.jit
def gemm(
    a,
    b,
    out,
    rows,
    columns,
    depth,
    a_row,  # strides are in elements
    a_column,
    b_row,
    b_column,
    out_row,
    out_column,
    a_batch,
    b_batch,
    out_batch,
    alpha,
    Rows: tl.constexpr,
    Columns: tl.constexpr,
    Depth: tl.constexpr,
    Precision: tl.constexpr,
):
    """Compute ``out = alpha * (a @ b)``, a tile of `Rows` by `Columns` a block, `Depth` of the sum at a time."""
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * Rows + tl.arange(0, Rows)
    column = tl.program_id(1) * Columns + tl.arange(0, Columns)
    inner = tl.arange(0, Depth)
    left = a + batch * a_batch + row[:, None].to(tl.int64) * a_row + inner[None, :] * a_column
    right = b + batch * b_batch + inner[:, None] * b_row + column[None, :].to(tl.int64) * b_column
    sums = tl.zeros((Rows, Columns), dtype=tl.float32)
    for start in range(0, depth, Depth):
        x = tl.load(left, mask=(row[:, None] < rows) & (inner[None, :] < depth - start), other=0.0)
        y = tl.load(right, mask=(inner[:, None] < depth - start) & (column[None, :] < columns), other=0.0)
        sums = tl.dot(x, y, sums, input_precision=Precision)
        left += Depth * a_column
        right += Depth * b_row
    place = out + batch * out_batch + row[:, None].to(tl.int64) * out_row + column[None, :].to(tl.int64) * out_column
    tl.store(place, (alpha * sums).to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < columns))
