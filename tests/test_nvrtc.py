"""Compiling CUDA C++ without a device."""

from __future__ import annotations

import pytest
from cuda.bindings import nvrtc
from cuda.pathfinder import DynamicLibNotFoundError

from cudatool._nvrtc import to_ptx
from cudatool.errors import DeviceUnavailableError


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise DynamicLibNotFoundError("no such file")

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", missing)
    with pytest.raises(DeviceUnavailableError, match="pip install nvidia-cuda-nvrtc"):
        to_ptx("", "kernels.cu")
