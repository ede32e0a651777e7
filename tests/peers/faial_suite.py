"""How racecheck does on the examples of Faial, a verifier of data-race freedom.

    python tests/peers/faial_suite.py DIR [--only TEXT] [--reasons]

DIR is a checkout of elliotsayes/faial (a copy of umb-svl's faial). The examples are called drf-X or racy-X. Its verifier
looks at one block with any number of threads and any arguments; here each kernel runs as :data:`RUNS` says. They are
compiled as GPUVerify's (``gpuverify_suite.py``): without optimization, the verifier's own words as nothing.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkers import Outcome, attempt
from gpuverify_suite import WORDS, call, ptx_of, table

from cudatool import _driver

_SIZE = 1 << 20  # bytes of each array
_NUMBER = 64  # what an integer is, and how many threads a block has
_RACE = frozenset(["racecheck"])


@dataclass(frozen=True)
class Run:
    """How a kernel is launched, where that is not one block of 64 threads, and what it is to be given.

    Attributes
    ----------
    more
        Text after the kernel's: an instance of a template, or a function that the example only declares.
    first
        The first integer of the first array.
    racy
        What the example is by CUDA's rules, if its name says otherwise.
    why
        Why it is.
    """

    grid: tuple[int, int, int] = (1, 1, 1)
    block: int = _NUMBER
    more: str = ""
    first: int = 0
    racy: bool | None = None
    why: str = ""
    macro: str = ""
    variable: str = ""


_SAME = "all threads write one value to y[0]: by PTX's model they race; the verifier lets them"
RUNS: dict[str, tuple[Run, ...]] = {
    "drf-2d": (Run(block=256),),
    "drf-assert-loop": (Run((16, 1, 1), 16),),
    "drf-local-array": (Run((4, 1, 1), 16, "__device__ uint func() { return 3; }"),),
    "drf-template-index": (Run(more="template __global__ void saxpy<int>(float, float *, float *, int);"),),
    "drf-warp": (Run(block=32),),
    **dict.fromkeys(
        ("drf-loop1", "drf-loop3", "drf-loop4", "drf-loop5", "drf-loop-comma-in-cond"), (Run(racy=True, why=_SAME),)
    ),
    "macro": (Run(racy=False), Run(macro="+ 0", racy=False), Run(macro="+ 1", racy=True)),
    "parse-gv": (
        Run((2, 2, 2), racy=True, why="the label is of one block; those of one x have the same elements"),
        Run((3, 1, 1), racy=True),
    ),
    "racy-device": (Run(variable="y"),),
    "racy-funcion-call-unknowns": (
        Run(more="__device__ unsigned times[64]; __device__ unsigned get(int i) { return times[i]++; }"),
    ),
    "racy-grid-level": (Run(racy=False, why="in one block each thread has its own element"), Run((4, 1, 1))),
    "racy-kernel-calls-return": (Run(first=1),),
    "racy-reduce": (Run(block=32),),
    "racy-template": (Run(more="template __global__ void saxpy<float>(float, float *, float *);"),),
    "racy-template-alias": (Run(more="template __global__ void saxpy<float>(float, float *, float *);"),),
    "racy-warp": (Run(block=32),),
}
NOT_PORTABLE = {"racy-2d": "4 MiB of static shared memory"}


def run(text: str, how: Run) -> None:
    """Compile and launch an example. Raises RuntimeError with the driver's error."""
    from cuda.bindings import driver

    words = "typedef unsigned uint;\n#define assert __assert\n#define __uniform_int(x) true\n" + WORDS
    words += "#define atomicInc(address, most) atomicInc((uint *)(address), most)\n#line 1\n"
    source = f"#define MACRO {how.macro}\n{words}{text}\n{how.more}\n"
    ptx = ptx_of(source, ["-G", "-default-device", "-std=c++17", "-arch=compute_90"])
    module = call(driver.cuModuleLoadData, ptx)
    function = call(driver.cuModuleGetFunction, module, re.findall(rb"\.entry (\w+)\(", ptx)[0])

    def array() -> int:
        address = call(driver.cuMemAlloc, _SIZE)
        call(driver.cuMemsetD8, address, 0, _SIZE)
        return int(address)

    if how.variable:
        _, address, _ = driver.cuModuleGetGlobal(module, how.variable.encode())
        pointer = np.array([array()], np.uint64)
        call(driver.cuMemcpyHtoD, address, pointer.ctypes.data, 8)
    entry = re.search(r"\.entry \w+\((.*?)\)", ptx.decode(), re.DOTALL)[1]
    parameters = re.findall(r"\.param \.(?:align \d+ \.)?(\w+) \S+?_param_\d+(?:\[(\d+)\])?", entry)
    arguments: list[np.ndarray] = []
    for kind, size in parameters:
        value = {"u32": np.uint32(_NUMBER), "f32": np.float32(1)}.get(kind)
        if kind == "u64":
            value = np.uint64(array())
            if how.first and not any(one.dtype == np.uint64 for one in arguments):
                first = np.array([how.first], np.int32)
                call(driver.cuMemcpyHtoD, int(value), first.ctypes.data, 4)
        arguments.append(np.zeros(int(size), np.uint8) if value is None else np.array([value]))
    places = np.array([one.ctypes.data for one in arguments], np.uint64)
    call(driver.cuLaunchKernel, function, *how.grid, how.block, 1, 1, 4096, 0, places.ctypes.data, 0)
    call(driver.cuCtxSynchronize)


def _run_on(text: str, how: Run, _: Any) -> None:
    run(text, how)


def outcomes(folder: Path, only: str) -> list[Outcome]:
    """Run the examples whose names contain `only`."""
    found = []
    for path in sorted((folder / "examples" / "drf").glob("*.cu")):
        if only not in path.stem or path.stem in NOT_PORTABLE:
            continue
        for how in RUNS.get(path.stem, (Run(),)):
            racy = path.stem.startswith("racy") if how.racy is None else how.racy
            name = f"{path.stem} {how.macro or how.grid}"
            expected = _RACE if racy else frozenset[str]()
            found.append(attempt(name, expected, partial(_run_on, path.read_text(), how), ("memcheck", "racecheck")))
            print(found[-1], file=sys.stderr, flush=True)
    return found


def _reasons() -> None:
    print("\n| example | expected | why |\n|---|---|---|")
    for name, runs in RUNS.items():
        for how in runs:
            if how.why:
                print(f"| {name} | {'a race' if how.racy else 'nothing'} | {how.why} |")
    for name, why in NOT_PORTABLE.items():
        print(f"| {name} | not run | {why} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if something is missed or false."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of elliotsayes/faial")
    parser.add_argument("--only", default="", metavar="TEXT", help="examples whose names contain this")
    parser.add_argument("--reasons", action="store_true", help="print why some names are read differently, as Markdown")
    options = parser.parse_args(arguments)
    _driver.choose("sim")
    for name in ("cuda.core", "cuda.bindings.driver", "cuda.bindings.nvrtc", "llvmlite.binding"):
        importlib.import_module(name)  # once, for all processes to come
    results = outcomes(options.folder, options.only)
    if not results:
        parser.error(f"no such examples in {options.folder}")
    table(results)
    if options.reasons:
        _reasons()
    return int(any(one.expected != one.found for one in results))


if __name__ == "__main__":
    sys.exit(main())
