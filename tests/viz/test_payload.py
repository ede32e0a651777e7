"""The page's document, read by a Python twin of the decoder in payload.js."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import HOSTILE, program

from cudatool import analyze, viz
from cudatool.viz.payload import column, payload


def decode(column: dict[str, Any]) -> list[float]:
    """Do what decodeColumn does."""
    dtype = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "f64": "<f8"}[column["d"]]
    stored = np.frombuffer(base64.b64decode(column["b"]), dtype)
    values: list[float] = [column["base"] + column["scale"] * value for value in stored.tolist()]
    assert column["n"] == len(values)
    return values


@settings(deadline=None)
@given(st.lists(st.integers(-(2**52), 2**52)))
def test_columns_decode_to_what_they_were(values: list[int]) -> None:
    assert values == decode(column(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "u8"),
        ([7], "u8"),
        ([0, 255], "u8"),
        ([0, 1, 256], "u16"),
        ([1 << 40, (1 << 40) + 65535, (1 << 40) + 1], "u16"),
        ([0, 512, 512 * 255], "u8"),
        ([0, 1, 1 << 16], "u32"),
        ([0, 1, 1 << 32], "f64"),
    ],
)
def test_columns_take_the_smallest_type(values: list[int], expected: str) -> None:
    assert expected == column(values)["d"]


def test_blocks_and_times_arrive_as_the_analysis_has_them() -> None:
    report = analyze.report(program())
    document = payload(report)
    (device,) = document["devices"]
    (curve,) = report.timelines
    assert (curve.time - report.trace.records["time"][0]).tolist() == decode(device["time"])
    for name in ("address", "size", "requested", "stream", "stack"):
        assert getattr(report.blocks, name).tolist() == decode(device["blocks"][name])
    # Times are rows of the timeline; what is never freed has the row after the last.
    rows = [*curve.index.tolist(), len(report.trace.records)]
    assert report.blocks.end.tolist() == [rows[int(row)] for row in decode(device["blocks"]["end"])]
    assert curve.peak() == device["peak"]["row"]


def test_operations_arrive_with_names_and_times_from_the_first_on() -> None:
    document = payload(analyze.report(program(repeat=2)))
    operations = document["operations"]
    assert [0, 40, 100, 140] == decode(operations["start"])
    assert ["kernel"] * 4 == [operations["names"][int(i)] for i in decode(operations["name"])]


def test_stacks_arrive_innermost_first() -> None:
    document = payload(analyze.report(program()))
    offsets = [int(i) for i in decode(document["stacks"]["offset"])]
    frames = [int(i) for i in decode(document["stacks"]["frame"])][offsets[1] : offsets[2]]
    functions = [int(i) for i in decode(document["frames"]["function"])]
    assert ["kernel", "<module>"] == [document["strings"][functions[i]] for i in frames]


def test_no_name_can_end_the_document() -> None:
    text = viz.page(analyze.report(program(HOSTILE)))
    (document,) = re.findall(r'<script type="application/json" id="payload">(.*?)</script>', text, re.DOTALL)
    assert "<" not in document
    assert HOSTILE == json.loads(document)["operations"]["names"][0]
    title = text.split("<title>")[1].split("</title>")[0]
    assert "<" not in title
    assert "hacked" not in text.replace(document, "").replace(title, "")


def test_the_page_names_nothing_to_load() -> None:
    text = viz.page(analyze.report(program()))
    outside_of_plotly, _ = text.split('<script type="text/plain" id="plotly">')
    assert "default-src 'none'" in text
    assert [] == re.findall(r"(?:src|href)\s*=\s*[\"']?(?!data:)[^\s\"']*//", outside_of_plotly)
