"""Types of :file:`_log_rows.c`."""

from typing import Any

def sort(rows: bytes, is_ours: Any, asks: Any, kept: Any, /) -> tuple[bytes, bytes, bytes, bytes]: ...
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
def ran(rows: Any, calls: Any, time: int, records: Any, /) -> int: ...
