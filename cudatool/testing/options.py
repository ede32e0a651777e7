"""The plugin's options, from the command line or the ini file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from cudatool.errors import CudatoolError, UsageError
from cudatool.text import printable, shortened

if TYPE_CHECKING:
    from cudatool.sanitize import Baseline, Outputs, Rule

__all__ = ["Options", "add_options", "is_on", "options_of"]

_DEFAULT_CHECKS: Final = "race,memcheck,synccheck"
_DEFAULT_MOST: Final = "5"
_DIGITS: Final = 9  # of a number of tests


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
        f"(default: {_DEFAULT_CHECKS}).",
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


def _given(config: pytest.Config, name: str) -> Any:
    """Return an option as the command line or the ini file has it."""
    on_the_line = getattr(config.option, name, None) or getattr(config.known_args_namespace, name, None)
    return on_the_line or config.getini(name)


def is_on(config: pytest.Config) -> bool:
    """Return whether every test is to be checked."""
    return bool(_given(config, "cudatool"))


@dataclass(frozen=True, slots=True)
class Options:
    """What a run asks for.

    Attributes
    ----------
    device
        As for :func:`cudatool.record`, empty for none given.
    checks
        For tests without a marker.
    rules, baseline
        What sets findings aside.
    baseline_path, updates_baseline
        Where the baseline is, and whether what is found is to be written there.
    outputs
        Where the findings of all tests go.
    allows_empty
        Whether a run may check nothing at all.
    most
        How many tests to list by their memory.
    """

    device: str
    checks: tuple[str, ...]
    rules: tuple[Rule, ...]
    baseline: Baseline
    baseline_path: str
    updates_baseline: bool
    outputs: Outputs
    allows_empty: bool
    most: int


_OPTIONS: Final = pytest.StashKey[Options]()


def options_of(config: pytest.Config) -> Options:
    """Return the options, read once; also choose the device.

    Raises
    ------
    pytest.UsageError
        One of them is wrong.
    """
    found = config.stash.get(_OPTIONS, None)
    if found is None:
        try:
            found = config.stash[_OPTIONS] = _read(config)
        except CudatoolError as error:
            raise pytest.UsageError(str(error)) from error
    return found


def _read(config: pytest.Config) -> Options:
    from cudatool import _driver
    from cudatool.sanitize import Baseline, parse_checks, parse_rules

    device = _given(config, "cudatool_device") or os.environ.get("CUDATOOL_DEVICE", "")
    _driver.choose(device or None)
    path, updates = _given(config, "cudatool_baseline") or "", bool(_given_update(config))
    if updates and not path:
        raise UsageError("--cudatool-update-baseline needs --cudatool-baseline=FILE")
    suppress = _given(config, "cudatool_suppress")
    tests = [word.partition("::")[0] for word in getattr(config.known_args_namespace, "file_or_dir", None) or ()]
    inputs = [*filter(os.path.isfile, tests), *(text[1:] for text in suppress if text.startswith("@"))]
    if path and not updates:
        inputs.append(path)
    most = _given(config, "cudatool_most_allocations") or _DEFAULT_MOST
    if not most.isdecimal() or len(most) > _DIGITS:
        raise UsageError(f"--cudatool-most-allocations={shortened(printable(most[:60]), 60)}: not a number")
    return Options(
        device=device,
        checks=parse_checks(_given(config, "cudatool_checks") or _DEFAULT_CHECKS),
        rules=parse_rules(suppress),
        baseline=Baseline.read(path, may_be_new=updates) if path else Baseline({}),
        baseline_path=path,
        updates_baseline=updates,
        outputs=_outputs(_given(config, "cudatool_report"), path if updates else None, inputs),
        allows_empty=bool(_given(config, "cudatool_allow_empty")),
        most=int(most),
    )


def _given_update(config: pytest.Config) -> bool:
    name = "cudatool_update_baseline"
    return bool(getattr(config.option, name, False) or getattr(config.known_args_namespace, name, False))


def _outputs(texts: list[str], baseline: str | None, inputs: list[str]) -> Outputs:
    from cudatool.sanitize import Outputs
    from cudatool.sanitize.report.outputs import FORMATS, Output

    named = [text if text.partition("=")[0] in FORMATS else f"json={text}" for text in texts]
    parsed = Outputs.parse(named, baseline, inputs=inputs)
    # The text report goes to stdout only on request: each test has printed its own.
    return Outputs(tuple(one for one in parsed.outputs if one != Output("text") or "text" in named))
