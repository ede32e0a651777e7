"""Columns of numbers are spelled as Python spells each of them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from cudatool.export import perfetto, sqlite
from cudatool.export.ascii import decimals, fractions, hexadecimals, texts
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Trace

SIGNED = [0, 1, 9, 10, 4_294_967_295, 4_294_967_296, 10**18, (1 << 63) - 1]
UNSIGNED = [0, 15, 16, 1 << 32, 1 << 63, (1 << 64) - 1]


@pytest.mark.parametrize(
    ("column", "expected"),
    [(SIGNED, SIGNED), ([*SIGNED, -1, -10, -(1 << 63)], [*SIGNED, -1, -10, -(1 << 63)]), ([7], [7]), ([], [])],
    ids=["none below zero", "below zero", "one", "no row"],
)
def test_decimal_numbers_of_a_column(column: list[int], expected: list[int]) -> None:
    spelled = texts(len(column), b"[", decimals(np.array(column, np.int64)), b"]")
    assert [json.loads(text) for text in spelled] == [[number] for number in expected]


def test_numbers_without_a_sign_have_all_64_bits() -> None:
    column = np.array(UNSIGNED, np.uint64)
    assert [int(text) for text in texts(len(column), decimals(column))] == UNSIGNED
    assert [json.loads(text) for text in texts(len(column), hexadecimals(column))] == [hex(n) for n in UNSIGNED]


def test_fractions_are_left_out_where_all_are_zero() -> None:
    assert texts(3, b"1", fractions(np.array([0, 50, 999]))) == [b"1.000", b"1.050", b"1.999"]
    assert texts(2, b"1", fractions(np.array([0, 0]))) == [b"1", b"1"]


def test_last_piece_may_have_any_number_of_rows(tmp_path: Path) -> None:
    """Rows go into the database several at a time; what is not known is NULL in each of them."""
    records = np.zeros(8192 + 3, RECORD)
    records["kind"] = Kind.BLOCK_ALLOC
    records["time"] = np.arange(len(records)) * 5
    records["address"] = np.arange(1, len(records) + 1) << 21
    records["size"] = 512
    records["kind"][-1] = Kind.BLOCK_FREE_REQUESTED
    records["address"][-1] = records["address"][0]
    sqlite.write(tmp_path / "out", Trace(records))
    database = sqlite3.connect(tmp_path / "out")
    rows = database.execute(
        "SELECT id, alloc_time, free_requested_time, free_completed_time FROM allocations"
    ).fetchall()
    database.close()
    assert rows[0] == (0, 0, 5 * 8194, None)
    assert rows[1:] == [(i, 5 * i, None, None) for i in range(1, 8194)]


def test_blocks_of_a_perfetto_trace_keep_their_own_numbers(tmp_path: Path) -> None:
    sizes, addresses = [512, 1 << 40, 1024], [1 << 21, 1 << 46, 0x200]
    records = np.zeros(3, RECORD)
    records["kind"] = Kind.BLOCK_ALLOC
    records["time"] = [1_000, 1_000_500, 12_345_678]
    records["size"], records["address"] = sizes, addresses
    perfetto.write(tmp_path / "out", Trace(records))
    events = json.loads((tmp_path / "out").read_text())["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    assert [event["args"]["bytes"] for event in begun] == sizes
    assert [event["args"]["address"] for event in begun] == [hex(address) for address in addresses]
    assert [event["ts"] for event in begun] == [0, 999.5, 12344.678]
