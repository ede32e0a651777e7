"""The race corpus on a GPU: where accesses are known there, the findings are those of the software device.

A program that is not checked there says why in its label (``cuda = ...``): driver calls past cudatool's runtime are not
recorded on a GPU, and of kernels only whole arguments are known.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cudatool._driver import gpu_names

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

sys.path.insert(0, str(Path(__file__).parents[1] / "races"))


def test_races_are_found_on_a_gpu_as_on_the_software_device() -> None:
    from run import run_all

    results = run_all("cuda")
    checked = [r for r in results if not r["skipped"]]
    wrong = {
        f"{r['program']} {r['variant']}": r["error"] or f"missed {r['missed']}, false {r['false']}"
        for r in checked
        if r["error"] or r["missed"] or r["false"]
    }
    assert {} == wrong
    assert len({r["program"] for r in checked}) >= 40
