"""A library that stands in for CUPTI, whose log is then the tests' own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def libcupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, from :file:`native/libcupti.c`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    made = tmp_path_factory.mktemp("native") / "libcupti.so"
    source = Path(__file__).with_name("native") / "libcupti.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True, timeout=60)
    return made
