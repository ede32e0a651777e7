"""Bytes and times in words, and back."""

from __future__ import annotations

import pytest

from cudatool.errors import ConfigError
from cudatool.units import format_bytes, format_time, parse_bytes


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


@pytest.mark.parametrize(
    ("time", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1_500, "1.5 us"), (999_999, "1 ms"), (2_500_000_000, "2.5 s"), (-2_000, "-2 us")],
)
def test_format_time(time, text):
    assert format_time(time) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("8GiB", 8 << 30), ("512 MB", 512_000_000), ("1.5k", 1536), ("2m", 2 << 20), ("7B", 7)],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "1 XiB", "1..5K", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)
