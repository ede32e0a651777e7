"""Distinct values against numpy's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatool.trace.distinct import distinct

NUMBERS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**63 - 1)))


@given(st.lists(NUMBERS, min_size=1, max_size=3))
def test_values_of_columns_are_those_of_unique(columns: list[list[int]]) -> None:
    arrays = [np.array(column, np.uint64) for column in columns]
    found = distinct(*arrays)
    assert (np.uint64, np.unique(np.concatenate(arrays)).tolist()) == (found.dtype, found.tolist())


@pytest.mark.parametrize("rows", [[], [(2, 1)], [(2, 1), (1, 5), (2, 1), (1, 4)]])
def test_rows_are_compared_field_by_field(rows: list[tuple[int, int]]) -> None:
    records = np.array(rows, [("thread", np.uint64), ("device", np.int16)])
    assert sorted(set(rows)) == distinct(records).tolist()
