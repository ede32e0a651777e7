"""Bytes and times in words, and back."""

from __future__ import annotations

import re

from cudatool.errors import ConfigError

__all__ = ["format_bytes", "format_time", "parse_bytes"]

_IEC = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)


def format_bytes(size: float) -> str:
    """Return `size` bytes with a binary unit and at most two decimals: ``"1.5 MiB"``, ``"512 B"``."""
    sign, value, unit = ("-" if size < 0 else ""), abs(float(size)), 0
    # 1023.995 would print as 1024.00: go to the next unit as soon as rounding reaches it.
    while round(value, 2) >= 1024 and unit < len(_IEC) - 1:
        value, unit = value / 1024, unit + 1
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{sign}{text} {_IEC[unit]}"


def format_time(time_ns: float) -> str:
    """Return a duration given in nanoseconds with a readable unit: ``"1.5 ms"``."""
    sign, value = ("-" if time_ns < 0 else ""), abs(float(time_ns))
    units = ["ns", "us", "ms", "s"]
    while round(value, 2) >= 1000 and len(units) > 1:
        value /= 1000
        del units[0]
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{sign}{text} {units[0]}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `text` names: ``"8GiB"``, ``"512 MB"``, ``"4096"``.

    ``KiB`` and so on are powers of 1024; ``KB`` and so on are powers of 1000; a bare ``K`` is 1024.

    Raises
    ------
    ConfigError
        `text` is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB or 8GiB")
    number, prefix, binary = match.groups()
    decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
    scale = (1000 if decimal else 1024) ** (" kmgtp".index(prefix.lower()) if prefix else 0)
    return int(float(number) * scale)
