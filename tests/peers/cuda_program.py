"""Run a program of CUDA C++ that ``rodinia_suite.py`` has compiled, in this process, on the software device.

    python tests/peers/cuda_program.py LIBRARY [ARGUMENT ...]

It imports what the device needs and nothing else: its start is part of what is measured.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from cudatool import _driver


def call(library: Path, arguments: Sequence[str]) -> int:
    """Load a program, and the modules that lie beside it, and call its main()."""
    _driver.initialize()
    program = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    modules = sorted(library.parent.glob("*.ptx"))
    for module in modules:
        if program.add_module(module.read_bytes()):
            raise RuntimeError(f"{module.name} cannot be loaded")
    if modules and program.start():
        raise RuntimeError("the device cannot launch a kernel")
    words = [library.stem.encode(), *(word.encode() for word in arguments)]
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    return int(program.main(len(words), argv))


if __name__ == "__main__":
    status = call(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    atexit._run_exitfuncs()
    ctypes.CDLL(None).exit(status)  # as a program in C++ ends: no interpreter is taken apart
