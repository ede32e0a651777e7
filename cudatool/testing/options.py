"""The plugin's options, on the command line or in the ini file. Their values: :mod:`.settings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from cudatool.config import DEFAULT_CHECKS
from cudatool.errors import CudatoolError

if TYPE_CHECKING:
    from cudatool.testing.settings import SessionOptions

__all__ = ["add_options", "given", "is_on", "options_of"]


def add_options(parser: pytest.Parser) -> None:
    """Declare them. Every option is an ini setting too, with underscores."""
    group = parser.getgroup("cudatool", "CUDA under the sanitizer (cudatool)")

    def add(name: str, metavar: str, text: str, *, several: bool = False) -> None:
        group.addoption(f"--{name}", metavar=metavar, action="append" if several else "store", help=text)
        key = name.replace("-", "_")
        if several:
            parser.addini(key, text, type="linelist")
        else:
            parser.addini(key, text)

    text = "Check each test for races and memory errors on the CUDA device."
    group.addoption("--cudatool", action="store_true", help=text)
    parser.addini("cudatool", text, type="bool", default=False)
    add("cudatool-device", "DEVICE", "auto, cuda, or sim[:OPTIONS], for example sim:schedule=lifo.")
    add(
        "cudatool-checks",
        "LIST",
        "What tests are checked for: race, memcheck, initcheck, racecheck, synccheck, leak, or all "
        f"(default: {DEFAULT_CHECKS}).",
    )
    add(
        "cudatool-suppress", "RULE|@FILE", "Findings to leave out, as for `cudatool sanitize --suppress`.", several=True
    )
    add("cudatool-baseline", "FILE", "Findings that are known, each with a reason and a last day.")
    group.addoption(
        "--cudatool-update-baseline", action="store_true", help="Write what is found to the baseline, and accept it."
    )
    add(
        "cudatool-report",
        "[FORMAT=]FILE",
        "Write all findings to FILE: json (the default), sarif, junit, gitlab or text; or `github` to the terminal.",
        several=True,
    )
    text = "Do not fail a run of --cudatool in which no test did anything on the device."
    group.addoption("--cudatool-allow-empty", action="store_true", help=text)
    parser.addini("cudatool_allow_empty", text, type="bool", default=False)
    add("cudatool-most-allocations", "N", "List the N tests that allocate most device memory at one time (default: 5).")


def given(config: pytest.Config, name: str) -> Any:
    """Return an option as the command line or the ini file has it."""
    on_the_line = getattr(config.option, name, None) or getattr(config.known_args_namespace, name, None)
    return on_the_line or config.getini(name)


def is_on(config: pytest.Config) -> bool:
    """Return whether every test is to be checked."""
    return bool(given(config, "cudatool"))


_OPTIONS: Final = pytest.StashKey["SessionOptions"]()


def options_of(config: pytest.Config) -> SessionOptions:
    """Return the options, read once; also choose the device.

    Raises
    ------
    pytest.UsageError
        One of them is wrong.
    """
    found = config.stash.get(_OPTIONS, None)
    if found is None:
        from cudatool.testing.settings import read  # the sanitizer: most of pytest's runs do not need it

        try:
            found = config.stash[_OPTIONS] = read(config)
        except CudatoolError as error:
            raise pytest.UsageError(str(error)) from error
    return found
