"""Compiling CUDA C++ without a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cuda.bindings import nvrtc
from cuda.pathfinder import DynamicLibNotFoundError

from cudatool.errors import DeviceUnavailableError
from cudatool.loading.shared_libraries import wheel_library
from cudatool.runtime.nvrtc import to_ptx


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise DynamicLibNotFoundError("no such file")

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", missing)
    with pytest.raises(DeviceUnavailableError, match="pip install nvidia-cuda-nvrtc"):
        to_ptx("", "kernels.cu")


def test_library_that_nvrtc_needs_is_loaded_with_it() -> None:
    """NVRTC 13.0, which PyTorch's wheels bring, does not find it beside itself."""
    program = (
        "import cudatool; cudatool.synchronize(); print('libnvrtc-builtins.so.' in open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"CUDATOOL_DEVICE": "sim"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout == "True\n") == (wheel_library("libnvrtc.so.13") is not None)
