"""Bytes, times and shares in words, and back."""

from __future__ import annotations

import pytest

from cudatool.errors import ConfigError
from cudatool.units import (
    bytes_range_parts,
    exact_bytes,
    format_bytes,
    format_share,
    format_time,
    parse_bytes,
    parse_time,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (20 << 20, "20 MiB"),
        (-(3 << 30), "-3 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (9_797_632, "9.34 MiB (9,797,632 B)")])
def test_exact_bytes_says_how_many_where_rounding_hides_it(size: int, text: str) -> None:
    assert text == exact_bytes(size)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0.0 %"),
        (0.0004, "< 0.1 %"),
        (0.125, "12.5 %"),
        (0.9994, "99.9 %"),
        (0.9996, "> 99.9 %"),
        (1.0, "100.0 %"),
    ],
)
def test_rounding_makes_no_share_all_or_nothing(share: float, text: str) -> None:
    assert text == format_share(share)


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (3 << 30, 4 << 30, "3 to 4 GiB"),
        (512 << 20, 4 << 30, "512 MiB to 4 GiB"),
        (3 << 30, (3 << 30) + 1, "3 GiB"),
        (3 << 30, None, "at least 3 GiB"),
    ],
)
def test_a_range_of_bytes(least, most, text):
    assert " ".join(bytes_range_parts(least, most)) == text


@pytest.mark.parametrize(
    ("time", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1_500, "1.5 us"), (999_999, "1 ms"), (2_500_000_000, "2.5 s"), (-2_000, "-2 us")],
)
def test_format_time(time, text):
    assert format_time(time) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("4096", 4096), ("8GiB", 8 << 30), ("512 MB", 512_000_000), ("1.5k", 1536), ("2m", 2 << 20), ("7B", 7)),
        *((".5K", 512), ("9007199254740993", (1 << 53) + 1), ("8388608.001GB", 8388608001000000)),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "1 XiB", "1..5K", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("1.5s", 1_500_000_000),
        ("200 ms", 200_000_000),
        ("2min", 120 * 10**9),
        ("0us", 0),
        ("1.0000000001h", None),
        ("7ns", 7),
    ],
)
def test_parse_time(text, time):
    if time is None:
        with pytest.raises(ConfigError, match="not a time"):
            parse_time(text)
    else:
        assert time == parse_time(text)


@pytest.mark.parametrize("text", ["", "5", "1.5", "-1s", "1 sec", "1e3s", "s", "9" * 50 + "s"])
def test_a_time_without_a_unit_is_refused(text):
    with pytest.raises(ConfigError, match=r"not a time; write for example 1\.5s"):
        parse_time(text)
