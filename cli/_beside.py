"""Reads NAME.stats.json next to NAME.pickle: facts that a PyTorch snapshot lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudatool.cli._text import say
from cudatool.files import read_input

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["with_statistics"]

_LARGEST = 16 << 20  # bytes of the file
_MOST_DEVICES = 128  # a record's device is a signed byte


def _fraction(value: Any) -> float | None:
    """Return a memory fraction, None if none was set; the value is a number, or a settings string."""
    if value in (None, ""):
        return None
    number = float(value) if isinstance(value, str) and len(value) < 32 else value
    if type(number) not in (int, float) or not 0 < number <= 1:
        raise TypeError
    return float(number)


def _totals(value: Any) -> list[int] | None:
    if value is None:
        return None
    if type(value) is not int or not 0 < value < 1 << 63:
        raise TypeError
    return [value] * _MOST_DEVICES


def _numbers(value: Any) -> dict[str, int] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError
    return {key: number for key, number in value.items() if type(number) is int}


_FACTS: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    # key, fact of the trace's header, what it is, its value
    ("memory_fraction", "memory_fraction", "number from 0 to 1", _fraction),
    ("device_total_bytes", "total_memory", "number of bytes", _totals),
    ("stats", "memory_stats", "JSON object", _numbers),
)


def with_statistics(trace: Trace, source: Path) -> Trace:
    """Add the facts of a file next to a snapshot to its header; report unused ones on stderr.

    ``memory_fraction`` is what the program gave to ``set_per_process_memory_fraction``, ``total_memory`` the bytes of
    each device, ``memory_stats`` what ``torch.cuda.memory_stats()`` was at the end.
    """
    path = source.parent / f"{source.name.split('.pickle')[0]}.stats.json"
    try:
        said = json.loads(read_input(path, _LARGEST))
    except FileNotFoundError:
        return trace
    except OSError as error:
        say(f"{path} is not used: {error.strerror}")
        return trace
    except (RecursionError, ValueError):
        said = None
    if not isinstance(said, dict):
        say(f"{path} is not used: it is not a JSON object")
        return trace
    for key, fact, what, value_of in _FACTS:
        try:
            value = value_of(said.get(key))
        except (TypeError, ValueError):
            say(f"{path}: {key} is not used: it is no {what}")
        else:
            trace.header |= {} if value is None else {fact: value}
    return trace
