"""The maps behind footprints: what is taken is forgotten, however much it was."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cudatool.sim import jit

PAGE = 4096
WRITE = 2


@pytest.mark.parametrize("pages", [1, 600])  # cleared page by page, and all at once
@pytest.mark.parametrize("first", [0, 5000])
def test_what_was_taken_is_forgotten(first: int, pages: int) -> None:
    base, size = 1 << 32, 10_000 * PAGE
    footprint = jit.Footprint(base, size)
    for _ in range(2):
        assert [] == footprint.take()
        ctypes.memset(footprint.addresses[1] + first * PAGE, 1, pages * PAGE)
        ctypes.memset(footprint.addresses[-1] + first, 1, pages)
        assert [(base + first * PAGE, pages * PAGE, WRITE)] == footprint.ranges()
        assert [(base + first * PAGE, pages * PAGE, WRITE)] == footprint.take()
    assert [] == footprint.ranges()


def runs_of(flags: np.ndarray, base: int) -> list[tuple[int, int, int]]:
    """Return the runs of equal bytes that are not 0, one byte after the other."""
    found: list[tuple[int, int, int]] = []
    for at in np.flatnonzero(flags).tolist():
        if found and found[-1][0] + found[-1][1] == base + at and found[-1][2] == flags[at]:
            found[-1] = (found[-1][0], found[-1][1] + 1, found[-1][2])
        else:
            found.append((base + at, 1, int(flags[at])))
    return found


@pytest.mark.some_of("seed", range(20), 6)
def test_runs_are_those_of_the_bytes_that_were_accessed(seed: int) -> None:
    base, pages = 1 << 32, 24
    random = np.random.default_rng(seed)
    footprint = jit.Footprint(base, pages * PAGE)
    for _ in range(3):
        flags = np.zeros((pages + 1) * PAGE, np.uint8)
        for _ in range(random.integers(1, 12)):
            start = int(random.integers(0, pages * PAGE))
            size = int(random.choice([1, 4, 8, 16, 300, PAGE, 3 * PAGE]))
            start -= start % int(random.choice([1, 8, PAGE]))
            stop, step = min(start + size, pages * PAGE), int(random.choice([1, 1, 2, 12]))
            flags[start:stop:step] |= 1 << int(random.integers(3))
        for bit, address in enumerate(footprint.addresses[:3]):
            accessed = (flags >> bit & 1).tobytes()
            ctypes.memmove(address, accessed, len(accessed))
        for page in np.unique(np.flatnonzero(flags) // PAGE).tolist():
            ctypes.memset(footprint.addresses[-1] + page, 1, 1)
        assert runs_of(flags, base) == footprint.take()
    assert [] == footprint.take()


def test_an_access_that_crosses_into_a_page_without_a_mark_is_seen_as_a_whole() -> None:
    footprint = jit.Footprint(1 << 32, 10 * PAGE)
    ctypes.memset(footprint.addresses[0] + 3 * PAGE - 4, 1, 8)
    ctypes.memset(footprint.addresses[-1] + 2, 1, 1)
    assert [((1 << 32) + 3 * PAGE - 4, 8, 1)] == footprint.take()
    assert [] == footprint.take()
