"""Runs of bytes, told in few records: always the same bytes."""

from __future__ import annotations

import numpy as np
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.collect.byte_sets import MASK_BITS, ByteSet, compress
from cudatool.trace.events import AccessFlag

R, W = int(AccessFlag.READ), int(AccessFlag.WRITE)


def bytes_of(sets: list[ByteSet]) -> dict[int, int]:
    """Byte -> how it is accessed. A byte that is told twice is an error."""
    found: dict[int, int] = {}
    for address, size, flags, aux0, aux1 in sets:
        if flags & AccessFlag.MASK:
            bits = aux0 | aux1 << 64
            starts = [address + i * size for i in range(MASK_BITS) if bits >> i & 1]
        else:
            starts = [address + row * aux0 for row in range(aux1 or 1)]
        for start in starts:
            for byte in range(start, start + size):
                assert byte not in found
                found[byte] = flags & ~AccessFlag.MASK
    return found


def runs_of(gaps: list[tuple[int, int, int]], unit: int) -> list[tuple[int, int, int]]:
    runs, at = [], 4096
    for gap, size, flags in gaps:
        at += gap * unit
        runs.append((at, size * unit, flags))
        at += size * unit
    return runs


gaps = st.tuples(st.integers(1, 5), st.integers(1, 200), st.sampled_from([R, W]))
small = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([R, R, R, W]))
equal = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 40)).map(
    lambda item: [(item[0], item[1], R)] * item[2]
)
programs = st.lists(equal | st.lists(small, max_size=60) | st.lists(gaps, max_size=3), max_size=8)


@settings(max_examples=examples(300), deadline=None)
@given(programs.map(lambda parts: [gap for part in parts for gap in part]), st.sampled_from([1, 2, 4, 12, 64]))
def test_compressed_runs_are_the_same_bytes(gaps: list[tuple[int, int, int]], unit: int) -> None:
    runs = runs_of(gaps, unit)
    expected = {byte: flags for start, size, flags in runs for byte in range(start, start + size)}
    assert expected == bytes_of(compress(runs))


def test_column_is_one_record() -> None:
    assert [(4096, 4, R, 512, 1000)] == compress([(4096 + 512 * row, 4, R) for row in range(1000)])


def test_scattered_elements_take_a_record_for_each_window_of_them() -> None:
    hit = np.flatnonzero(np.random.default_rng(0).random(128 * 256) < 0.5)
    compressed = compress([(int(index) * 4, 4, W) for index in hit])
    assert len(compressed) <= 400  # of more than 8,000 runs


def test_few_runs_stay_as_they_are() -> None:
    assert [(0, 4, R, 0, 0), (8, 4, W, 0, 0)] == compress([(0, 4, R), (8, 4, W)])


def test_rows_of_a_box_stay_together_however_few() -> None:
    runs = [(0, 4, 1), (64, 4, 1), (0x1000, 4, 2), (0x1020, 4, 2), (0x1040, 4, 2)]
    assert [(0, 4, 1, 64, 2), (0x1000, 4, 2, 32, 3)] == compress(runs, of_boxes=True)
    assert [(0, 4, 1, 0, 0), (64, 4, 2, 0, 0)] == compress([(0, 4, 1), (64, 4, 2)], of_boxes=True)
