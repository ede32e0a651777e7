"""The rules of the exports must be those of the analyses, which they cannot import."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import all_of_them

from cudatool import analyze
from cudatool.collect import torch_snapshot
from cudatool.export import spans
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Trace

KINDS = (
    *(Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED, Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE),
    *(Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP, Kind.MEM_ALLOC, Kind.MEM_FREE, Kind.KERNEL_LAUNCH),
)


def assert_alike(trace: Trace) -> None:
    for rows, found in (
        (analyze.blocks(trace), spans.block_spans(trace)),
        (analyze.segments(trace), spans.segment_spans(trace)),
    ):
        expected = (
            rows.address.tolist(),
            rows.size.tolist(),
            rows.start.tolist(),
            rows.freed.tolist(),
            rows.end.tolist(),
        )
        never = len(trace.records)
        assert expected == (
            [span.address for span in found],
            [span.size for span in found],
            [span.start for span in found],
            [never if span.freed is None else span.freed for span in found],
            [never if span.end is None else span.end for span in found],
        )


@pytest.mark.parametrize("path", all_of_them(), ids=lambda path: path.name.removesuffix(".pickle.xz"))
def test_spans_of_a_recording_are_those_that_the_analysis_finds(path: Path) -> None:
    assert_alike(torch_snapshot.read(path))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(0, 4), st.integers(1, 3)), max_size=40)
)
def test_spans_of_any_events_are_those_that_the_analysis_finds(
    events: list[tuple[Kind, int, int, int]],
) -> None:
    records = np.zeros(len(events), RECORD)
    for record, (kind, device, address, size) in zip(records, events, strict=True):
        record["kind"], record["device"], record["address"], record["size"] = kind, device, address << 21, size << 21
    assert_alike(Trace(records))
