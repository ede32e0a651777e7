"""The allocator's counters as a table for people, like ``torch.cuda.memory_summary``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cudatool.units import format_bytes

__all__ = ["memory_summary"]

_ROWS: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("memory in use by the program", "allocated_bytes", format_bytes),
    ("memory in use, or freed but not yet by all streams", "active_bytes", format_bytes),
    ("memory as requested, before rounding", "requested_bytes", format_bytes),
    ("memory reserved on the device", "reserved_bytes", format_bytes),
    ("free memory in split segments", "inactive_split_bytes", format_bytes),
    ("allocations", "allocation", str),
    ("active blocks", "active", str),
    ("segments", "segment", str),
    ("free blocks in split segments", "inactive_split", str),
)
_POOLS = (("all", ""), ("large_pool", "  large pool"), ("small_pool", "  small pool"))
_COLUMNS = ("current", "peak", "allocated", "freed")
_HEADINGS = ("now", "peak", "total added", "total freed")


def memory_summary(stats: Mapping[str, int], *, device: int, abbreviated: bool = False) -> str:
    """Return a table of the counters, one line each, without a newline at the end.

    Parameters
    ----------
    stats
        What :meth:`CachingAllocator.stats` returns.
    device
        Ordinal for the title.
    abbreviated
        Leave out the division by pool.
    """
    table: list[tuple[str, ...]] = []
    for label, name, text in _ROWS:
        for pool, pool_label in _POOLS[: 1 if abbreviated else None]:
            table.append((pool_label or label, *(text(stats[f"{name}.{pool}.{column}"]) for column in _COLUMNS)))
    labels = max(len(row[0]) for row in table)
    widths = [
        max(len(heading), *(len(row[index]) for row in table)) for index, heading in enumerate(_HEADINGS, start=1)
    ]

    def line(label: str, cells: tuple[str, ...]) -> str:
        return label.ljust(labels) + "".join(
            "  " + cell.rjust(width) for cell, width in zip(cells, widths, strict=True)
        )

    return "\n".join(
        [
            f"Memory of device {device}. Out of memory: {stats['num_ooms']}; retries after emptying the cache: "
            f"{stats['num_alloc_retries']}; driver allocations: {stats['num_device_alloc']}, "
            f"frees: {stats['num_device_free']}",
            line("", _HEADINGS),
            *(line(row[0], row[1:]) for row in table),
        ]
    )
