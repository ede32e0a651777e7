"""NVRTC's version, which is known without NVRTC once it was asked."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool.loading.shared_libraries import wheel_library
from cudatool.sim.toolchain import nvrtc

PROGRAM = """
import ctypes
from cudatool import _driver
_driver.initialize()
from cudatool.loading.shared_libraries import wheel_library
library, major, minor = ctypes.CDLL("libnvrtc.so.13"), ctypes.c_int(), ctypes.c_int()
assert library.nvrtcVersion(None, None)
assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
print(major.value, minor.value, str(wheel_library("libnvrtc.so.13")) in open("/proc/self/maps").read())
"""


@pytest.mark.skipif(wheel_library("libnvrtc.so.13") is None, reason="no NVRTC is installed")
def test_the_version_is_kept(tmp_path: Path) -> None:
    program = PROGRAM.replace("assert library.nvrtcVersion(None, None)\n", "")
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim", "CUDATOOL_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True).stdout
        for text in (program, program, PROGRAM)
    ]
    first, second, third = (one.split() for one in said)
    assert ["13", "True"] == [first[0], first[2]]
    assert [*first[:2], "False"] == second
    assert first == third  # which asked for what only NVRTC itself answers


class Library:
    """A library that says another minor version each time."""

    def __init__(self) -> None:
        self.asked = 0

    def cudatool_nvrtc_version(self, major: int, minor: int) -> int:
        self.asked += 1
        ctypes.c_int.from_address(major).value, ctypes.c_int.from_address(minor).value = 13, self.asked
        return 0


def test_another_file_is_asked_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path / "kept"))
    real, library, found = tmp_path / "libnvrtc.so", Library(), []
    for text in ("a", "a", "bc", "bc"):
        if not real.exists() or real.read_text() != text:
            real.write_text(text)
        major, minor = ctypes.c_int(), ctypes.c_int()
        assert 0 == nvrtc._version(library, str(real), ctypes.addressof(major), ctypes.addressof(minor))
        found.append((major.value, minor.value))
    assert [(13, 1), (13, 1), (13, 2), (13, 2)] == found
