"""Numbers with thousands of digits, and others that no machine has: refused in one short line, at once."""

from __future__ import annotations

import pytest

from cudatool import _driver
from cudatool.cli import main
from cudatool.errors import ConfigError
from cudatool.limits import SETTINGS_LENGTH
from cudatool.memory import Settings
from cudatool.units import parse_bytes, parse_count

HUGE = (
    "9" * 5000,
    "9" * 400,
    "9" * 100_000,
    "9" * 5000 + "x",
    "9." + "9" * 5000,
    "0x" + "f" * 5000,
    "1e999",
    "-" + "9" * 5000,
)


def refused(function, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        function(text)
    assert len(str(caught.value)) < 700  # a list of the known settings included
    assert "\n" not in str(caught.value)
    assert "set_int_max_str_digits" not in str(caught.value)


@pytest.mark.parametrize("number", HUGE, ids=lambda text: f"{text[:4]} {len(text)}")
class TestHugeNumbers:
    def test_as_a_size(self, number: str) -> None:
        refused(parse_bytes, number)
        refused(parse_bytes, number + "GiB")

    def test_as_a_count(self, number: str) -> None:
        refused(parse_count, number)

    @pytest.mark.parametrize("option", ["memory", "count", "seed", "threads", "timeout"])
    def test_as_an_option_of_the_device(self, number: str, option: str) -> None:
        refused(_driver._parse, f"sim:{option}={number}")

    @pytest.mark.parametrize(
        "key", ["max_split_size_mb", "pinned_num_register_threads", "roundup_power2_divisions", "large_segment_size_mb"]
    )
    def test_as_an_allocator_setting(self, number: str, key: str) -> None:
        if number[0] == "9" and number.isdecimal():
            refused(Settings.parse, f"{key}:{number}")
            refused(Settings.parse, f"roundup_power2_divisions:[{number}:1]")
        refused(Settings.parse, f"garbage_collection_threshold:{number}")
        refused(Settings.parse, f"{key}_{number}:1")


@pytest.mark.parametrize(
    "words",
    [
        ("sanitize", "--error-exitcode", "9" * 5000, "x.py"),
        ("sanitize", "--explore", "9" * 5000, "x.py"),
        ("sanitize", "--explore", "3000000000", "x.py"),
        ("replay", "--device", "9" * 5000, "x.ctrace"),
        ("x" * 5000,),
    ],
    ids=lambda words: f"{words[0][:8]} {len(words)}",
)
def test_on_the_command_line(words: tuple[str, ...], capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["cudatool", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert 2 == left.value.code
    assert all(len(line) <= 200 for line in capsys.readouterr().err.splitlines())


def test_the_largest_numbers_are_read() -> None:
    assert (1 << 63) - 1 == parse_count(str((1 << 63) - 1))
    refused(parse_count, str(1 << 63))
    assert 4 << 40 == parse_bytes("4TiB")
    assert 5 == int(Settings.parse("roundup_power2_divisions:" + "0" * 4000 + "4").roundup_power2_divisions[0]) + 1


def test_settings_have_a_length_that_tables_can_show() -> None:
    size = "256:1,"
    longest = "roundup_power2_divisions:[" + size * ((SETTINGS_LENGTH - 27) // len(size)) + "]"
    assert 1 == Settings.parse(longest).roundup_power2_divisions[0]
    refused(Settings.parse, longest + "," * (SETTINGS_LENGTH + 1 - len(longest)))
