"""What the plugin's options say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import pytest

from cudatool import _driver
from cudatool.config import DEFAULT_CHECKS, DEVICE
from cudatool.errors import UsageError
from cudatool.sanitize import Baseline, Outputs, SuppressionRule, parse_checks, parse_rules
from cudatool.sanitize.report.outputs import FORMATS, Output
from cudatool.testing.options import given
from cudatool.text import printable, shortened

__all__ = ["SessionOptions", "read"]

_DEFAULT_MOST: Final = "5"
_DIGITS: Final = 9  # of a number of tests


@dataclass(frozen=True, slots=True)
class SessionOptions:
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
    rules: tuple[SuppressionRule, ...]
    baseline: Baseline
    baseline_path: str
    updates_baseline: bool
    outputs: Outputs
    allows_empty: bool
    most: int


def read(config: pytest.Config) -> SessionOptions:
    """Read the options, and choose the device.

    Raises
    ------
    CudatoolError
        One of them is wrong.
    """
    device = given(config, "cudatool_device") or DEVICE.given()
    _driver.choose(device or None)
    path, updates = given(config, "cudatool_baseline") or "", bool(_given_update(config))
    if updates and not path:
        raise UsageError("--cudatool-update-baseline needs --cudatool-baseline=FILE")
    suppress = given(config, "cudatool_suppress")
    tests = [word.partition("::")[0] for word in getattr(config.known_args_namespace, "file_or_dir", None) or ()]
    inputs = [*filter(os.path.isfile, tests), *(text[1:] for text in suppress if text.startswith("@"))]
    if path and not updates:
        inputs.append(path)
    most = given(config, "cudatool_most_allocations") or _DEFAULT_MOST
    if not most.isdecimal() or len(most) > _DIGITS:
        raise UsageError(f"--cudatool-most-allocations={shortened(printable(most[:60]), 60)}: not a number")
    return SessionOptions(
        device=device,
        checks=parse_checks(given(config, "cudatool_checks") or DEFAULT_CHECKS),
        rules=parse_rules(suppress),
        baseline=Baseline.read(path, may_be_new=updates) if path else Baseline({}),
        baseline_path=path,
        updates_baseline=updates,
        outputs=_outputs(given(config, "cudatool_report"), path if updates else None, inputs),
        allows_empty=bool(given(config, "cudatool_allow_empty")),
        most=int(most),
    )


def _given_update(config: pytest.Config) -> bool:
    name = "cudatool_update_baseline"
    return bool(getattr(config.option, name, False) or getattr(config.known_args_namespace, name, False))


def _outputs(texts: list[str], baseline: str | None, inputs: list[str]) -> Outputs:
    named = [text if text.partition("=")[0] in FORMATS else f"json={text}" for text in texts]
    parsed = Outputs.parse(named, baseline, inputs=inputs)
    # The text report goes to stdout only on request: each test has printed its own.
    return Outputs(tuple(one for one in parsed.outputs if one != Output("text") or "text" in named))
