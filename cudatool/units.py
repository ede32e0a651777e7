"""Bytes, times, counts and shares in words, and back."""

from __future__ import annotations

import re

from cudatool.errors import ConfigError
from cudatool.text import quoted

__all__ = [
    "counted",
    "exact_bytes",
    "format_bytes",
    "bytes_range_parts",
    "format_share",
    "format_time",
    "parse_bytes",
    "parse_count",
    "parse_time",
]

_IEC = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LONGEST = 40  # characters of a size
_DIGITS = 19  # of 2**63
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)

_TIME = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(ns|us|ms|s|min|h)\s*")
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``"1 launch"``, ``"2,000 launches"``; `plural` is for nouns that have another ending than -s or -es."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + ('es' if noun.endswith(('ch', 'ss')) else 's')}"


def format_bytes(size: float) -> str:
    """Return `size` bytes with a binary unit and at most two decimals: ``"1.5 MiB"``, ``"512 B"``."""
    sign, value, unit = ("-" if size < 0 else ""), abs(float(size)), 0
    # 1023.995 would print as 1024.00: go to the next unit as soon as rounding reaches it.
    while round(value, 2) >= 1024 and unit < len(_IEC) - 1:
        value, unit = value / 1024, unit + 1
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{sign}{text} {_IEC[unit]}"


def exact_bytes(size: int) -> str:
    """Return `size` bytes so that no other size reads the same: ``"1.5 MiB"``, ``"9.34 MiB (9,797,632 B)"``."""
    text = format_bytes(size)
    return text if parse_bytes(text) == size else f"{text} ({size:,} B)"


def bytes_range_parts(least: int, most: int | None) -> tuple[str, ...]:
    """Return a range of bytes, in parts that may stand on lines of their own.

    ``("3.6 to", "3.9 GiB")``, or ``("at least", "3.6 GiB")`` if there is no `most`.
    """
    first = format_bytes(least)
    if most is None:
        return "at least", first
    last = format_bytes(most)
    if first == last:
        return (first,)
    number, unit = first.split()
    return f"{number if unit == last.split()[1] else first} to", last


def format_share(share: float) -> str:
    """Return a share in percent with one decimal: ``"12.5 %"``.

    Rounding never makes it all or nothing: 0.9999 is ``"> 99.9 %"``, and 0.0001 ``"< 0.1 %"``.
    """
    text = f"{share:.1%}"
    if text == "100.0%" and share < 1:
        return "> 99.9 %"
    if text == "0.0%" and share > 0:
        return "< 0.1 %"
    return f"{text[:-1]} %"


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
    # No size is longer: the expression takes quadratic time where it does not match.
    match = _SIZE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ConfigError(f"{quoted(text)} is not a size; write for example 512MiB or 8GiB")
    number, prefix, binary = match.groups()
    decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
    scale = (1000 if decimal else 1024) ** (" kmgtp".index(prefix.lower()) if prefix else 0)
    whole, _, fraction = number.partition(".")  # not as a float, which has 53 bits
    size: int = int(whole or "0") * scale + int(fraction or "0") * scale // 10 ** len(fraction)
    if size >= 1 << 63:
        raise ConfigError(f"{quoted(text)} is more memory than addresses can name")
    return size


def parse_count(text: str) -> int:
    """Return the whole number, not negative, that `text` writes in decimal digits.

    Raises
    ------
    ConfigError
        `text` is none, or not below 2**63.
    """
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{quoted(text)} is not a whole number")
    number = int(text) if len(text) <= _DIGITS else 1 << 63  # Python refuses to read thousands of digits
    if number >= 1 << 63:
        raise ConfigError(f"{quoted(text)} is too large")
    return number


def parse_time(text: str) -> int:
    """Return the nanoseconds that `text` names, which must have a unit: ``"1.5s"``, ``"200 ms"``, ``"2min"``.

    Raises
    ------
    ConfigError
        `text` is no time, or has no unit.
    """
    match = _TIME.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ConfigError(f"{quoted(text)} is not a time; write for example 1.5s, 200ms or 2min")
    whole, _, fraction = match[1].partition(".")
    unit = _NANOSECONDS[match[2]]
    return int(whole) * unit + int(fraction.ljust(9, "0")) * unit // 10**9
