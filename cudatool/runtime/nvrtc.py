"""CUDA C++ to PTX through NVRTC, which needs no driver and no device."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from cudatool.errors import CompileError, DeviceUnavailableError, UsageError
from cudatool.loading.shared_libraries import wheel_folders
from cudatool.text import quoted

__all__ = ["architecture_number", "include_paths", "to_ptx"]

_ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d+[af]?)$")


@functools.cache
def include_paths() -> list[str]:
    """Return where CUDA's and CCCL's headers were installed."""
    candidates = [folder / "cu13" / sub for folder in wheel_folders() for sub in ("include", "include/cccl")]
    return [str(path) for path in candidates if path.is_dir()]


def architecture_number(name: str) -> str:
    """Return the number of an architecture as PTX and NVRTC spell it: ``"90a"`` of ``"sm_90a"``.

    Raises
    ------
    UsageError
        It is none.
    """
    match = _ARCHITECTURE.match(name)
    if match is None:
        raise UsageError(f"{quoted(name)} is no architecture; write sm_90")
    return match[1]


def to_ptx(
    source: str,
    name: str,
    *,
    architecture: str = "sm_90",
    include: Sequence[str] = (),
    define: Sequence[str] = (),
    expressions: Sequence[str] = (),
) -> bytes:
    """Compile CUDA C++ to PTX, with source positions.

    Parameters
    ----------
    name
        Of the file, for messages and positions.
    architecture
        ``"sm_90"`` or ``"compute_90"``.
    include
        Directories, searched before CUDA's own headers.
    define
        Macros: ``"N"`` or ``"N=4"``.
    expressions
        Template instances to compile: ``"scale<float>"``.

    Raises
    ------
    UsageError
        The architecture is none, or NVRTC does not know it.
    CompileError
        NVRTC refused the source; the error's ``log`` has its messages.
    DeviceUnavailableError
        This machine has no NVRTC.
    """
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    options = [f"--gpu-architecture=compute_{architecture_number(architecture)}", "--generate-line-info", "--std=c++17"]
    options += [f"-D{one}" for one in define] + [f"-I{path}" for path in (*include, *include_paths())]
    ok = nvrtc.nvrtcResult.NVRTC_SUCCESS
    try:
        status, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    except DynamicLibNotFoundError as error:
        raise DeviceUnavailableError("compiling CUDA C++ needs NVRTC: pip install nvidia-cuda-nvrtc") from error
    if status != ok:
        raise CompileError(f"{name}: NVRTC could not start ({status.name})")
    try:
        for expression in expressions:
            nvrtc.nvrtcAddNameExpression(program, expression.encode())
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            raise UsageError(f"NVRTC does not take these options: {' '.join(options[:3])}")
        if status != ok:
            raise CompileError(f"{name} does not compile ({status.name})", _text(nvrtc, program, "ProgramLog"))
        return _text(nvrtc, program, "PTX").encode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: object, program: object, what: str) -> str:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    buffer = bytearray(size)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.rstrip(b"\0").decode("utf-8", "replace")
