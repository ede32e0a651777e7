"""The table of counters."""

from __future__ import annotations

from cudatool.memory import CachingAllocator, memory_summary

MIB = 1024 * 1024


def test_every_line_has_the_same_width_and_the_numbers_have_units(allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(3 * MIB, 0))
    allocator.malloc(MIB, 0)
    title, *lines = memory_summary(allocator.stats(), device=2).splitlines()
    assert "Memory of device 2." in title
    assert 1 == len({len(line) for line in lines})
    (in_use,) = [line for line in lines if line.startswith("memory in use by the program")]
    assert ["1", "MiB", "3", "MiB", "4", "MiB", "3", "MiB"] == in_use.split()[-8:]


def test_abbreviated_table_has_no_pools(allocator: CachingAllocator) -> None:
    full, short = (memory_summary(allocator.stats(), device=0, abbreviated=a).splitlines() for a in (False, True))
    assert (2 + 9 * 3, 2 + 9) == (len(full), len(short))
    assert not any("pool" in line for line in short)
