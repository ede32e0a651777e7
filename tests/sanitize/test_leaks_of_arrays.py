"""CUDA arrays are allocations: one that is never destroyed is a leak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import cudatool as ct
from cudatool import _driver
from cudatool.recording import record
from cudatool.sanitize import FindingKind, check
from cudatool.trace import reader


def _ok(result: tuple[Any, ...]) -> Any:
    assert result[0] == driver.CUresult.CUDA_SUCCESS
    return result[1] if len(result) > 1 else None


def test_array_that_is_never_destroyed_leaks(tmp_path: Path) -> None:
    if _driver.initialize().kind != "sim":
        pytest.skip("driver calls are recorded on the software device")
    ct.synchronize()  # makes the context current
    description = driver.CUDA_ARRAY_DESCRIPTOR()
    description.Width, description.Height = 256, 4
    description.Format, description.NumChannels = driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1
    with record(tmp_path / "run.ctrace"):
        _ok(driver.cuArrayDestroy(_ok(driver.cuArrayCreate(description))))
        kept = _ok(driver.cuArrayCreate(description))
    (finding,) = check(reader.read(tmp_path / "run.ctrace"), ["leak"]).on_device
    _ok(driver.cuArrayDestroy(kept))
    assert finding.kind is FindingKind.LEAK
    assert finding.size >= 256 * 4 * 4
    assert finding.stack[0].function.endswith("test_array_that_is_never_destroyed_leaks")
