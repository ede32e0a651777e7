"""Libraries that a recorded program, or a process that it started, loaded, and whose work its trace may lack."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from cudatool.text import first_names
from cudatool.trace.model import Trace

__all__ = ["Library", "libraries_of", "unrecorded_libraries", "why_unrecorded"]


class Library(StrEnum):
    """A library that can use a device. The values are part of the file format: add, never rename."""

    PYTORCH = "PyTorch"
    CUPY = "CuPy"
    JAX = "JAX"
    TENSORFLOW = "TensorFlow"
    NUMBA = "numba"
    DRIVER = "the CUDA driver"
    """What gave memory, or did not, where the program asked it directly; no library that a program loads."""


def libraries_of(trace: Trace) -> tuple[str, ...]:
    """Return the libraries that the program loaded. A newer recorder may name more than :class:`Library` does."""
    return tuple(trace.header.get("libraries", ()))


def unrecorded_libraries(trace: Trace) -> tuple[str, ...]:
    """Return the libraries whose work is not recorded, or PyTorch's, which may be recorded: those of the program and of
    the processes that it started.
    """
    on_sim = trace.header.get("device_kind") == "sim"  # where the driver's calls are recorded, and so all of numba's
    names = dict.fromkeys((*libraries_of(trace), *trace.header.get("child_libraries", ())))
    return tuple(name for name in names if not (on_sim and name == Library.NUMBA))


def why_unrecorded(libraries: Sequence[str]) -> list[str]:
    """Return sentences that say where the work of these libraries is recorded."""
    said = []
    if Library.PYTORCH in libraries:
        said.append("PyTorch is recorded on a GPU only, and needs a build for CUDA.")
    if others := [name for name in libraries if name != Library.PYTORCH]:
        said.append(f"{first_names(others)} {'is' if len(others) == 1 else 'are'} recorded on a GPU only.")
    return said
