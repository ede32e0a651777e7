"""The tables of a data set: one row for a column, from which the files, the views and the reference in docs derive."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["LAYOUT", "NO_RANK", "PARTITIONS", "SCHEMA", "TABLES", "Column"]

SCHEMA: Final = "cudatool.dataset/1"
"""Columns are added under the same number, never renamed or removed."""

LAYOUT: Final = 4
"""Rises by one when columns are added; each part says which one it was written with."""

NO_RANK: Final = "__HIVE_DEFAULT_PARTITION__"
"""Hive's name of the folder for NULL."""


class Column(NamedTuple):
    """A column: its SQL type, and what it holds. Times are ns since the first event of the trace, sizes bytes.

    It is NULL in parts of a layout before `since`.
    """

    name: str
    type: str
    meaning: str
    since: int = 1


PARTITIONS: Final = (
    Column("run", "VARCHAR", "the run that the trace belongs to"),
    Column("rank", "INTEGER", "its rank; NULL if it has none"),
    Column("trace", "VARCHAR", "the trace: its file's name, and a hash of its path"),
)
"""The folders that each part lies in, which are columns of every table, too."""

_DEVICE: Final = Column("device", "INTEGER", "the device's ordinal; -1 for the host")
_STEP: Final = Column("step", "INTEGER", "the step it is in, from 0; NULL outside of steps")
_STACK: Final = Column("stack", "BIGINT", "hash of its stack's frames, the same in every trace; NULL without a stack")
_SITE: Final = Column(
    "site", "VARCHAR", "innermost frame of the user's own code, as `train.py:12 (step)`, or why there is none"
)
_LIBRARY: Final = Column(
    "library", "VARCHAR", "library whose own memory pool it is of, such as CuPy's; NULL for all others", since=2
)
_TIME: Final = Column("time", "BIGINT", "when; NULL if the recording has no clock")
_MEMORY: Final = (
    Column("pool", "UBIGINT", "0 for the default pool"),
    Column("stream", "UINTEGER", "stream number, unique in its trace"),
    Column("address", "UBIGINT", "where"),
    Column("size", "BIGINT", "bytes that it occupies"),
)

TABLES: Final[dict[str, tuple[Column, ...]]] = {
    "ranks": (
        Column("device", "INTEGER", "a row for each device of a trace; NULL if the trace has no device memory"),
        Column("source", "VARCHAR", "the file that was converted"),
        Column("format", "VARCHAR", "`cudatool`, `torch` or `rmm`"),
        Column("world_size", "INTEGER", "number of ranks of the job; NULL where not recorded"),
        Column("local_rank", "INTEGER", "rank on its host; NULL where not recorded"),
        Column("host", "VARCHAR", "host name; NULL where not recorded"),
        Column("is_child", "BOOLEAN", "the process was started by a recorded program"),
        Column("events", "BIGINT", "number of events of the trace"),
        Column("ending", "VARCHAR", "`closed`, `killed`, `cut` ...: how the recording ended"),
        Column("notes", "VARCHAR", "what is missing from the trace, one sentence a line; empty if nothing"),
        Column("simulated", "BOOLEAN", "the device's times are the software device's, from a cost model", since=3),
        Column("libraries", "VARCHAR", "libraries that the program loaded, with commas between"),
        Column("unix_start_ns", "BIGINT", "time of the first event since 1970; NULL where not recorded"),
        Column("duration", "BIGINT", "ns from the first to the last event; NULL if the recording has no clock"),
        Column("allocations", "BIGINT", "number of blocks that were handed out"),
        Column("peak_active", "BIGINT", "most bytes in use or still needed by a stream"),
        Column("peak_allocated", "BIGINT", "most bytes in use"),
        Column("peak_reserved", "BIGINT", "most bytes taken from the driver; NULL where not recorded"),
        Column("end_active", "BIGINT", "bytes active after the last event"),
        Column("reserved_at_peak", "BIGINT", "bytes reserved when most were active; NULL where not recorded"),
        Column("peak_time", "BIGINT", "first moment with the most bytes active"),
        Column("physical_peak", "BIGINT", "most bytes from cuMemCreate, which no other column counts", since=3),
        Column("steps", "INTEGER", "number of steps that were found, without the last one, whose end is not known"),
        Column("steps_source", "VARCHAR", "where the steps come from, in words"),
        Column("steps_marked", "BOOLEAN", "ranges of the program name the steps; else they are inferred"),
        Column("ooms", "INTEGER", "how often memory ran out"),
        Column("first_oom_time", "BIGINT", "when it first did; NULL if never"),
        Column("leak_verdict", "VARCHAR", "the verdict of `cudatool leaks`"),
    ),
    "steps": (
        _DEVICE,
        Column("step", "INTEGER", "from 0"),
        Column("start_time", "BIGINT", "when it began"),
        Column("end_time", "BIGINT", "when the next one began; NULL for the last step"),
        Column("peak_active", "BIGINT", "most bytes active in it"),
        Column("end_active", "BIGINT", "bytes active at its end"),
        Column("allocations", "BIGINT", "blocks that were handed out in it"),
    ),
    "sites": (
        _DEVICE,
        _SITE,
        Column("category", "VARCHAR", "what the memory is for, inferred as in `cudatool snapshot`"),
        Column("allocations", "BIGINT", "blocks that were handed out"),
        Column("bytes", "BIGINT", "their bytes together"),
        Column("peak_bytes", "BIGINT", "bytes of it that were active at the device's peak"),
        Column("end_bytes", "BIGINT", "bytes of it that were active after the last event"),
        Column("never_freed", "BIGINT", "blocks whose free is not recorded"),
    ),
    "leaks": (
        _DEVICE,
        Column("site", "VARCHAR", "call site that holds more and more, as `cudatool leaks` names it"),
        Column("is_certain", "BOOLEAN", "a leak; else growth that may have another cause"),
        Column("growth", "BIGINT", "bytes in all"),
        Column("per_step", "BIGINT", "bytes in each step"),
    ),
    "checkpoints": (
        _DEVICE,
        Column("sequence", "BIGINT", "number of allocations that the hashes cover"),
        Column("own_hash", "BIGINT", "of the user's own frames and the requested bytes of each, in order"),
        Column("full_hash", "BIGINT", "of all frames and the requested bytes of each, in order"),
    ),
    "allocations": (
        Column("allocation", "BIGINT", "number in the trace, in order"),
        Column("sequence", "BIGINT", "number among those of its device since the recording began; NULL if before"),
        _DEVICE,
        *_MEMORY,
        Column("requested", "BIGINT", "bytes that the program asked for"),
        Column("alloc_time", "BIGINT", "when; NULL if the recording has no clock"),
        Column("free_requested_time", "BIGINT", "when the program gave it back; NULL if it did not"),
        Column("free_completed_time", "BIGINT", "when no stream needed it any more; NULL if never"),
        Column("alloc_event", "BIGINT", "number of the event"),
        Column("free_requested_event", "BIGINT", "number of the event; NULL if there is none"),
        Column("free_completed_event", "BIGINT", "number of the event; NULL if there is none"),
        _STEP,
        _STACK,
        _SITE,
        Column("category", "VARCHAR", "what it is for, inferred as in `cudatool snapshot`"),
        _LIBRARY,
        Column("own_hash", "BIGINT", "hash of the user's own frames of its stack, and of the requested bytes"),
        Column("full_hash", "BIGINT", "hash of all frames of its stack, and of the requested bytes"),
    ),
    "segments": (
        Column("segment", "BIGINT", "number in the trace, in order"),
        _DEVICE,
        *_MEMORY,
        Column("small", "BOOLEAN", "of the pool for small blocks"),
        Column("expandable", "BOOLEAN", "mapped piece by piece"),
        Column("alloc_time", "BIGINT", "when; NULL if the recording has no clock"),
        Column("free_time", "BIGINT", "when it was given back; NULL if never"),
        _STEP,
        _STACK,
        _LIBRARY,
    ),
    "kernels": (
        Column("event", "BIGINT", "number of the event that enqueued it"),
        Column(
            "kind",
            "VARCHAR",
            "`KERNEL_LAUNCH`, `MEMCPY`, `MEMSET`, `GEMM`, `COLLECTIVE` ...; in a graph `KERNEL_LAUNCH` or `EXECUTION`",
        ),
        Column("name", "VARCHAR", "kernel, routine or operation"),
        _DEVICE,
        Column("stream", "UINTEGER", "stream number, unique in its trace"),
        Column("size", "BIGINT", "bytes, as the event's kind defines them; NULL in a graph"),
        Column("time", "BIGINT", "when it was enqueued; NULL if the recording has no clock"),
        Column("device_start", "BIGINT", "start on the device's own clock; NULL where not recorded"),
        Column("device_end", "BIGINT", "end on the device's own clock; NULL where not recorded"),
        _STEP,
        _STACK,
        Column(
            "in_graph",
            "BOOLEAN",
            "a launch of a graph ran it; the row of the launch, of the kind `GRAPH_LAUNCH`, lasts from the first of "
            "these to the last",
            since=4,
        ),
    ),
    "stacks": (
        Column("stack", "BIGINT", "hash of its frames"),
        Column("depth", "INTEGER", "0 is the innermost frame"),
        Column("file", "VARCHAR", "of the frame"),
        Column("function", "VARCHAR", "of the frame"),
        Column("line", "BIGINT", "of the frame"),
        Column("code", "VARCHAR", "whose it is: `own`, `library`, `C++`, `allocator`"),
    ),
    "events": (
        Column("event", "BIGINT", "number in the trace, from 0"),
        _TIME,
        Column("kind", "VARCHAR", "name of the event's kind"),
        _DEVICE,
        Column("flags", "UINTEGER", "as the event's kind defines them"),
        Column("thread", "VARCHAR", "name of the host thread"),
        Column("stream", "UINTEGER", "stream number, unique in its trace"),
        Column("correlation", "UBIGINT", "ties an operation to its times and accesses"),
        Column("name", "VARCHAR", "as the event's kind defines it; NULL if empty"),
        Column("address", "UBIGINT", "as the event's kind defines it"),
        Column("size", "UBIGINT", "as the event's kind defines it"),
        Column("aux0", "UBIGINT", "as the event's kind defines it"),
        Column("aux1", "UBIGINT", "as the event's kind defines it"),
        _STEP,
        _STACK,
    ),
}
"""Table -> its columns besides :data:`PARTITIONS`. Each part has one file of each table."""
