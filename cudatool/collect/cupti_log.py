"""What the rows of :file:`_cupti.c`'s log refer to by number: names, frames and stacks."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.collect.cupti_rows import WORK
from cudatool.ptx.kernel_names import kernel_name
from cudatool.trace import stacks
from cudatool.trace.model import Frame
from cudatool.trace.packages import package_of

__all__ = ["Stack", "Tables"]

_CALLED_THROUGH = ("/cuda/bindings/", "/_ctypes.", "/libffi", "/cudatool/", "/bin/python", "/libpython")
"""Libraries through which Python code calls the driver: whose call it is, Python's stack says."""

_EXTENSION = re.compile(r"\.(cpython-[^/]*|abi3)\.so$")
"""A module of Python."""

_FOLDER_OF_MODULES = re.compile(r"^.*/(site|dist)-packages/|^.*/lib-dynload/")


class Stack(NamedTuple):
    """A stack of the log: its id in traces, whether our runtime makes the call, the library that does, and PyTorch's
    module that is called, as an index into :attr:`Tables.paths`.
    """

    id: int
    is_ours: bool
    library: str
    module: int = 0


class Tables:
    """What the rows of the log refer to by number, in the order in which it came.

    Attributes
    ----------
    native_names
        Names as the driver spells them.
    names
        The same as events have them, after those of :data:`~cudatool.collect.cupti_rows.WORK`.
    stacks
        The stacks of calls; the first stands for none.
    paths
        The paths of modules of PyTorch; the first stands for none.
    """

    def __init__(self) -> None:
        self.native_names = [""]
        self.names = ["", *WORK.values()]
        self.stacks = [Stack(0, False, "")]
        self.paths = [""]
        self._frames: list[Frame | None] = [None]
        self._without_module: dict[tuple[int, bytes], Stack] = {}  # by library and frames: layers have them in common
        self._stack_ids, self._stack_is_ours = np.zeros(1, np.uint32), np.zeros(1, np.bool_)
        self._modules = np.zeros(1, np.uint32)

    def add(self, names: list[bytes], frames: list[bytes], found: list[bytes], paths: list[bytes]) -> None:
        """Add what the log has noted since the last time."""
        texts = [name.decode("utf-8", "replace") for name in names]
        self.native_names += texts
        self.names += map(kernel_name, texts)
        self._frames += map(_frame, frames)
        self.paths += (path.decode("utf-8", "replace").partition("\n")[0] for path in paths)
        self.stacks += map(self._stack, found)

    def kernel(self, number: int) -> str:
        """Return the name of a kernel."""
        return self.names[len(WORK) + number]

    def columns(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
        """Return the id of each stack, whether our runtime makes the call, and the module that does."""
        if len(self._stack_ids) != len(self.stacks):
            self._stack_ids = np.array([stack.id for stack in self.stacks], np.uint32)
            self._stack_is_ours = np.array([stack.is_ours for stack in self.stacks])
            self._modules = np.array([stack.module for stack in self.stacks], np.uint32)
        return self._stack_ids, self._stack_is_ours, self._modules

    def _stack(self, numbers: bytes) -> Stack:
        library, module = np.frombuffer(numbers, np.uint32, 2).tolist()
        key = library, numbers[8:]
        found = self._without_module.get(key)
        if found is None:
            found = self._without_module[key] = self._called_by(library, np.frombuffer(key[1], np.uint32).tolist())
        return found._replace(module=module)

    def _called_by(self, library: int, python: list[int]) -> Stack:
        of_library = self._frames[library]
        through_python = of_library is None or any(part in of_library.file for part in _CALLED_THROUGH)
        called = [frame for number in python if (frame := self._frames[number]) is not None]
        ours = through_python and _is_of_our_runtime(called)
        if not through_python and of_library is not None:
            called.insert(0, of_library)
        return Stack(stacks.intern(called), ours, "" if of_library is None else of_library.file)


def _frame(key: bytes) -> Frame:
    """Return the frame that a key of the log's table stands for: the line in 4 bytes, the file, 0, the function."""
    line = int.from_bytes(key[:4], "little")
    file, _, function = key[4:].decode("utf-8", "replace").partition("\0")
    return Frame(file, function or _library_name(file), line)


def _library_name(file: str) -> str:
    """Return the name of a library; of a Python extension module the module's name, ``cupy.cuda.memory``."""
    name = _EXTENSION.sub("", file)
    if name == file:
        return os.path.basename(file)
    package = package_of(file)
    inside = os.path.relpath(name, os.path.dirname(package)) if package else _FOLDER_OF_MODULES.sub("", name)
    return inside.strip("/").replace("/", ".")


def _is_of_our_runtime(frames: list[Frame]) -> bool:
    """Whether our runtime makes a call, directly or through an allocator of the program's.

    Innermost is one of its files then, but for cuda-python's own. Any of our files may be further out: a command that
    runs the program, a decorator, what tells how threads hand over.
    """
    paths = [_inside(frame.file) for frame in frames if not any(part in frame.file for part in _CUDA_PYTHON)]
    return _ALLOCATORS in paths or (bool(paths) and paths[0].startswith(_CALLERS))


@cache
def _inside(file: str) -> str:
    """Return the path of a file of ours inside of the package; empty for others."""
    path = os.path.realpath(file)
    return path[len(_OURS) :] if path.startswith(_OURS) else ""


_OURS = os.path.join(os.path.realpath(Path(__file__).parent.parent), "")
_CUDA_PYTHON = ("/cuda/bindings/", "/cuda/core/")
_ALLOCATORS = "memory/pluggable.py"
_CALLERS = ("_driver.py", "blas/", "gds/", "graphs/", "memory/", "nccl/", "ops/", "random/", "runtime/", "tunable/")
"""Our rooms that call the driver. What they do, they report themselves."""
