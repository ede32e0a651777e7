"""Types of :file:`_log_rows.c`."""

from typing import Any

def sort(rows: bytes, is_ours: Any, asks: Any, kept: Any, /) -> tuple[bytes, bytes, bytes, bytes]: ...
def count(rows: Any, is_work: Any, /) -> tuple[int, int, int]: ...
def translate(
    rows: Any,
    first: int,
    how: Any,
    stack_ids: Any,
    module_names: Any,
    kernel_names: Any,
    correlations: Any,
    begins: int,
    pointed: bytes,
    names: dict[str, int],
    streams: dict[int, int],
    events: dict[int, int],
    threads: dict[int, int],
    of_graphs: set[int],
    launches: tuple[Any, ...] | None,
    records: Any,
    enqueued: Any,
    /,
) -> tuple[int, int, int, bool, bytes | None]: ...
def remember(known: Any, calls: Any, /) -> None: ...
def look_up(known: Any, rows: Any, calls: Any, /) -> tuple[int, int, int]: ...
def streams(rows: Any, calls: Any, /) -> bytes: ...
def ran(rows: Any, calls: Any, streams: Any, ids: Any, first_correlation: int, time: int, records: Any, /) -> int: ...
