"""What a trace file may say: the type of each fact in its header, and the range of each number in its records.

The reader calls this once, so that no later part has to ask: a fact of another type is left out, as is an event whose
numbers no recorder writes, and a note says so. What this cudatool does not know, a newer one may: it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.text import quoted
from cudatool.trace.events import Kind
from cudatool.units import counted

__all__ = ["FACTS", "MAX_ADDRESS", "MAX_MEMORY", "MAX_TIME", "valid_facts", "valid_records"]

MAX_ADDRESS: Final = 1 << 62
"""Above every address; the end of a range still fits 64 bits with a sign."""
MAX_MEMORY: Final = 1 << 48
"""More bytes than an allocation can have; the sum of thousands still fits 64 bits with a sign."""
MAX_TIME: Final = 1 << 62
"""146 years in ns; the difference of two times still fits 64 bits with a sign."""

_MAX_WORD: Final = 1 << 63


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_WORD:
        raise TypeError
    return value


def _fraction(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise TypeError
    return float(value)


def _time(value: Any) -> str:
    datetime.fromisoformat(value)
    return _text(value)


def _axis(value: Any) -> str:
    if value not in ("clock", "index"):
        raise ValueError
    return _text(value)


def _list_of(item: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError
        return [item(one) for one in value]

    return check


def _pair(value: Any) -> list[int]:
    first, second = _list_of(_count)(value)
    return [first, second]


def _by_device(value: Any) -> dict[int, int]:
    if not isinstance(value, dict):
        raise TypeError
    return {int(device): _count(number) for device, number in value.items()}  # JSON has text for keys


def _by_name(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise TypeError
    return {_text(name): _count(number) for name, number in value.items()}


def _window(value: Any) -> list[int]:
    start, stop, count = _list_of(_count)(value)
    if not start <= stop <= count:
        raise ValueError
    return [start, stop, count]


FACTS: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    # name -> what it is, and what returns it with its type (or raises TypeError or ValueError)
    "accesses": ("true or false", _flag),
    "allocator_conf": ("text", _text),
    "argv": ("a list of texts", _list_of(_text)),
    "checks": ("a list of texts", _list_of(_text)),
    "child_libraries": ("a list of texts", _list_of(_text)),
    "cudatool": ("text", _text),
    "device": ("text", _text),
    "device_kind": ("text", _text),
    "driver_ran_before": ("true or false", _flag),
    "end_time": ("a time", _time),
    "exit_status": ("a number", _count),
    "format": ("text", _text),
    "memory_fraction": ("a number from 0 to 1", _fraction),
    "nvtx_tool": ("text", _text),
    "parent_pid": ("a number", _count),
    "parent_trace": ("text", _text),
    "pid": ("a number", _count),
    "pools": ("a list of pairs of numbers", _list_of(_pair)),
    "prior_allocations": ("a number", _count),
    "in_flight_before": ("a number", _count),
    "prior_bytes": ("a number", _count),
    "prior_records": ("a number for each device", _by_device),
    "heap_blocks_left": ("a number for each name", _by_name),
    "history_kept": ("a number from 0 to 1", _fraction),
    "host": ("text", _text),
    "installed": ("a list of texts", _list_of(_text)),
    "job": ("text", _text),
    "local_rank": ("text", _text),
    "libraries": ("a list of texts", _list_of(_text)),
    "cupti_version": ("a number", _count),
    "cupti_error": ("text", _text),
    "kernels_told_late": ("true or false", _flag),
    "python": ("text", _text),
    "rank": ("text", _text),
    "records_accesses": ("true or false", _flag),
    "recording_error": ("text", _text),
    "run": ("text", _text),
    "start_time": ("a time", _time),
    "start_time_ns": ("a number", _count),
    "start_unix_ns": ("a number", _count),
    "time_axis": ('"clock" or "index"', _axis),
    "total_memory": ("a list of numbers", _list_of(_count)),
    "trigger": ("text", _text),
    "unknown_before": ("a list of texts", _list_of(_text)),
    "watches_host_memory": ("true or false", _flag),
    "watches_host_reads": ("true or false", _flag),
    "world_size": ("text", _text),
    "window": ("three numbers that grow", _window),
}
"""The facts in a trace's header that some part of cudatool reads. There may be others."""


def valid_facts(facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts of a header, those in :data:`FACTS` with their types, and a sentence for each left out."""
    kept, notes = {}, []
    for name, value in facts.items():
        what, check = FACTS.get(name, ("", None))
        try:
            kept[name] = value if check is None else check(value)
        except (TypeError, ValueError):
            notes.append(f"The header's {quoted(name)} is not {what}: it was left out.")
    return kept, notes


_PLACE: Final = {"address": MAX_ADDRESS, "size": MAX_MEMORY}
_MEMORY: Final = (
    *(kind for kind in Kind if Kind.BLOCK_ALLOC <= kind <= Kind.HOST_FREE and kind not in (Kind.OOM, Kind.DEVICE_USE)),
    Kind.POOL_ALLOC,
    Kind.POOL_FREE,
)
_BLOCK: Final = {**_PLACE, "aux0": MAX_MEMORY}
_LIMITS: Final[dict[Kind, dict[str, int]]] = {
    # kind -> the fields that are addresses, sizes or times, and what they are below
    **dict.fromkeys((Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED), _BLOCK),
    **dict.fromkeys((Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE, Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP), _PLACE),
    **dict.fromkeys((Kind.MEM_ALLOC, Kind.MEM_FREE, Kind.BLOCK_RECORD_STREAM, Kind.GRAPH_POINTER), _PLACE),
    **dict.fromkeys((Kind.HOST_ALLOC, Kind.HOST_FREE), _BLOCK),
    **dict.fromkeys((Kind.MEMSET, Kind.GEMM, Kind.COLLECTIVE), _PLACE),
    **dict.fromkeys((Kind.STREAM_WRITE_VALUE, Kind.STREAM_WAIT_VALUE), _PLACE),
    Kind.MEMORY_PLAN: {**_PLACE, "aux0": MAX_MEMORY, "aux1": MAX_MEMORY},
    Kind.PLANNED_BUFFER: {**_PLACE, "aux0": MAX_MEMORY, "aux1": MAX_MEMORY},
    Kind.FUSED_OPERATION: {"aux0": MAX_MEMORY, "aux1": MAX_MEMORY},
    Kind.GENERATED_LINE: {"aux0": MAX_MEMORY, "aux1": MAX_MEMORY},
    Kind.GENERATED_FACT: {"aux0": MAX_MEMORY},
    Kind.MODULE_TENSOR: _PLACE,
    Kind.DEVICE_USE: dict.fromkeys(("size", "address", "aux0"), MAX_MEMORY),
    Kind.MEM_MAP: {**_PLACE, "aux0": MAX_ADDRESS},
    Kind.MEM_UNMAP: _PLACE,
    Kind.POOL_ALLOC: _BLOCK,
    Kind.POOL_FREE: _PLACE,
    Kind.POOL_HELD: {"size": MAX_MEMORY, "aux0": MAX_MEMORY},
    Kind.POOL_USE: dict.fromkeys(("size", "aux0", "aux1"), MAX_MEMORY),
    Kind.PHYSICAL_ALLOC: {"size": MAX_MEMORY},
    Kind.PHYSICAL_FREE: {"size": MAX_MEMORY},
    Kind.MEMCPY: {**_PLACE, "aux0": MAX_ADDRESS},
    Kind.ACCESS: _PLACE,
    Kind.HOST_ACCESS: _PLACE,
    Kind.EXECUTION: {"aux0": MAX_TIME, "aux1": MAX_TIME},
    Kind.CALL: {"aux0": MAX_TIME},
    Kind.STREAM_SYNCHRONIZE: {"aux1": MAX_TIME},
    Kind.EVENT_SYNCHRONIZE: {"aux1": MAX_TIME},
    Kind.DEVICE_SYNCHRONIZE: {"aux1": MAX_TIME},
}


def valid_records(records: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.void], list[str]]:
    """Return the records that a recorder may have written, and sentences about the others.

    An event of a kind that is not known stays. The address of a wild access that a checker found (``FINDING``) may be
    any.

    Raises
    ------
    ValueError
        Together the events allocate more than 64 bits can count.
    """
    if not len(records):
        return records, []
    notes = []
    kind = records["kind"]
    count = np.bincount(kind, minlength=256)
    time = records["time"]
    wrong = (time >= MAX_TIME) | (time <= -MAX_TIME)
    for known, limits in _LIMITS.items():
        if count[known]:
            for field, limit in limits.items():
                beyond = records[field] >= np.uint64(limit)
                if beyond.any():
                    wrong |= beyond & (kind == known)
    newer = {number: int(count[number]) for number in np.flatnonzero(count).tolist() if number not in _KINDS}
    if newer:  # counted by what the reader knows, and said: it may have been what orders two others
        number, numbers = counted(sum(newer.values()), "event"), ", ".join(map(str, newer))
        notes.append(f"This cudatool does not know the kind of {number} ({numbers}).")
    if wrong.any():
        notes.append(f"{counted(int(wrong.sum()), 'event')} left out: a time, an address or a size cannot be right.")
        records = records[~wrong]
    if float(records["size"][np.isin(records["kind"], _MEMORY)].sum(dtype=np.float64)) >= _MAX_WORD:
        raise ValueError("its allocations together are larger than any number of bytes can be")
    return records, notes


_KINDS: Final = frozenset(map(int, Kind))
