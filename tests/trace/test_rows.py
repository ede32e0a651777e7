"""Passes over rows in C, against NumPy."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.trace import _rows

ROW = np.dtype([("first", "<u8"), ("narrow", "<u2"), ("other", "<u2"), ("wide", "<u4")])
_numbers = st.integers(0, 0xFFFFFFFF)


def rows_of(wide, narrow=()):
    rows = np.zeros(len(wide), ROW)
    rows["first"] = np.arange(len(wide), dtype=np.uint64) * np.uint64(0x01020304)
    rows["other"] = 0xABCD
    rows["wide"] = wide
    rows["narrow"][: len(narrow)] = narrow
    return rows


def written(rows, replaced, at=0):
    with tempfile.TemporaryFile() as file:
        _rows.write(rows, ROW.itemsize, file.fileno(), at, replaced)
        file.seek(at)
        return np.frombuffer(file.read(), ROW)


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3), _numbers), max_size=50), st.lists(st.integers(0, 0xFFFF), max_size=50))
def test_distinct_values_come_in_the_order_of_their_first_rows(wide, narrow):
    rows = rows_of(wide, narrow[: len(wide)])
    for column, offset, width in (("narrow", 8, 2), ("wide", 12, 4)):
        (found,) = _rows.distinct(rows, ROW.itemsize, ((offset, width),))
        assert list(dict.fromkeys(rows[column].tolist())) == np.frombuffer(found, np.uint32).tolist()
    assert _rows.distinct(rows, ROW.itemsize, ((8, 2), (12, 4)))[1] == found


def test_many_values_are_all_found_and_replaced():
    wide = np.random.default_rng(1).integers(0, 1 << 32, 5000, np.uint64)
    rows = rows_of(np.concatenate([wide, wide[::-1]]))
    (values,) = _rows.distinct(rows, ROW.itemsize, ((12, 4),))
    indices = np.arange(len(values) // 4, dtype=np.uint32)
    out = written(rows, ((12, 4, values, indices),), at=3)
    assert np.array_equal(np.frombuffer(values, np.uint32)[out["wide"]], rows["wide"])
    assert np.array_equal(out[["first", "narrow", "other"]], rows[["first", "narrow", "other"]])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40), st.randoms())
def test_columns_are_replaced_and_the_rest_is_copied(pairs, random):
    rows = rows_of([wide for wide, _ in pairs], [narrow for _, narrow in pairs])
    before = rows.copy()
    table = np.array([random.randrange(0xFFFF) for _ in range(10)], np.uint32)
    keys = np.arange(10, dtype=np.uint32)
    out = written(rows, ((12, 4, keys, table), (8, 2, keys, table)))
    assert np.array_equal(before, rows)
    for column in ("wide", "narrow"):
        before[column] = table[before[column]]
    assert np.array_equal(before, out)


def test_what_does_not_fit_is_refused(tmp_path):
    rows, none = rows_of([1, 2]), b""
    one, two = np.array([1], np.uint32), np.array([1, 2], np.uint32)
    for size, offset, width in ((16, 13, 4), (16, -1, 4), (16, 12, 3), (0, 0, 4), (15, 0, 4), (-16, 0, 4)):
        with pytest.raises(ValueError, match="no such column"):
            _rows.distinct(rows, size, ((offset, width),))
    with pytest.raises(ValueError, match="too many"):
        _rows.distinct(rows, ROW.itemsize, ((12, 4),) * 5)
    with open(tmp_path / "out", "wb") as out:
        for replaced in (((12, 4, one, one),), ((12, 4, two, one),), ((14, 4, two, two),), ((12, 4, none, none),)):
            with pytest.raises(ValueError, match="column"):
                _rows.write(rows, ROW.itemsize, out.fileno(), 0, replaced)
        for size in (15, 0, -16, 1 << 20):
            with pytest.raises(ValueError, match="no whole rows"):
                _rows.write(rows, size, out.fileno(), 0, ())
        with pytest.raises(TypeError, match="tuple"):
            _rows.write(rows, ROW.itemsize, out.fileno(), 0, (1,))
    with open(tmp_path / "out", "rb") as read_only, pytest.raises(OSError, match="Bad file descriptor"):
        _rows.write(rows, ROW.itemsize, read_only.fileno(), 0, ())
    assert (tmp_path / "out").read_bytes() == b""
