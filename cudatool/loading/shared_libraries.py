"""Where NVIDIA's libraries and headers are on this machine, and which libraries this process has loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

__all__ = ["loaded", "open_nvrtc_builtins", "wheel_folders", "wheel_library"]


def wheel_folders() -> list[Path]:
    """Return the folders into which NVIDIA's wheels are installed; each wheel has one in there, or shares ``cu13``."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []


def wheel_library(name: str) -> Path | None:
    """Return one of CUDA 13's libraries, where it is installed as a wheel."""
    places = (folder / "cu13" / "lib" / name for folder in wheel_folders())
    return next(filter(Path.exists, places), None)


def open_nvrtc_builtins(nvrtc: Path) -> None:
    """Open what NVRTC needs besides: some releases do not look for it in their own folder."""
    for builtins in nvrtc.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(os.fspath(builtins))


def loaded(name: str) -> ctypes.CDLL | None:
    """Return a library that something of this process has loaded, without loading it."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
