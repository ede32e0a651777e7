"""The maps behind footprints: what is taken is forgotten, however much it was."""

from __future__ import annotations

import ctypes

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
