"""Named ranges and the lanes that they are drawn in."""

from __future__ import annotations

from typing import Any

from records import trace

from cudatool import analyze
from cudatool.trace.events import Kind


def push(name: str, **more: Any) -> tuple[Kind, dict[str, Any]]:
    return Kind.RANGE_PUSH, {"name": name, "device": -1, **more}


def pop(**more: Any) -> tuple[Kind, dict[str, Any]]:
    return Kind.RANGE_POP, {"device": -1, **more}


def found(*rows: tuple[Kind, dict[str, Any]], device: int = 0) -> list[tuple[str, int, int, int]]:
    """Name, start, end and lane of each."""
    recorded = trace(*rows)
    made = analyze.ranges(recorded, device)
    columns = (made.name.tolist(), made.start.tolist(), made.end.tolist(), made.lane.tolist())
    return [(recorded.names[name], *places) for name, *places in zip(*columns, strict=True)]


def test_a_range_inside_of_another_lies_below_it() -> None:
    assert [("1", 0, 5, 0), ("2", 1, 2, 1), ("3", 3, 4, 1)] == found(
        push("1"), push("2"), pop(), push("3"), pop(), pop()
    )


def test_each_thread_ends_its_own_ranges() -> None:
    rows = (push("1", thread=1), push("2", thread=2), pop(thread=1), pop(thread=2), push("3", thread=2))
    assert [("1", 0, 2, 0), ("2", 1, 3, 1), ("3", 4, 5, 0)] == found(*rows)


def test_ranges_that_overlap_end_by_their_number() -> None:
    start, end = Kind.RANGE_START, Kind.RANGE_END
    rows = [
        (kind, {"name": str(n), "aux0": n, "device": -1}) for kind, n in ((start, 7), (start, 8), (end, 7), (end, 8))
    ]
    assert [("7", 0, 2, 0), ("8", 1, 3, 1)] == found(*rows)


def test_another_device_s_ranges_and_ends_without_a_start_are_left_out() -> None:
    assert [("2", 2, 3, 0)] == found(pop(), push("1", device=1), push("2"), pop())
