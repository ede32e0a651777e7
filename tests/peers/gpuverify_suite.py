"""How the checkers of kernels do on the CUDA part of GPUVerify's test suite.

    python tests/peers/gpuverify_suite.py DIR [--curand INCLUDE] [--only TEXT] [--every N] [--reasons]

DIR is a checkout of mc-imperial/gpuverify. The first lines of a test say what GPUVerify must find and for which launch.
Its kernels are compiled as they are, without optimization: accesses that a compiler may drop are part of a label.
Annotations of the verifier become nothing, ``__assert`` an assertion of CUDA. An array that a kernel is given has 8 MiB
of zeros, as GPUVerify's have no end. INCLUDE is where cuRAND's headers are.

GPUVerify proves kernels for all inputs; a checker sees one run. So `INPUTS` names the inputs that a label is about. Where
a label is no statement about CUDA's rules, `EXPLAINED` says what is to be found, and why.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from checkers import Outcome, attempt

from cudatool import _driver

CHECKS = ("memcheck", "racecheck", "synccheck")
_SIZE = 8 << 20  # bytes of each array
_MAX_THREADS = 1024  # of a block
_MAX_BLOCKS = 64  # enough for each label, and quick

# What nvcc includes for them, and the word that shows it.
_HEADERS = {"cooperative_groups": "cooperative_groups", "curand_kernel": "curand", "curand_mtgp32_kernel": "Mtgp32"}

# Words of the verifier's language, as far as tests use them.
WORDS = """
extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, size_t);
#define __assert(...) ((__VA_ARGS__) ? (void)0 : __assertfail(#__VA_ARGS__, "kernel.cu", __LINE__, "", 1))
#define __requires(...) ((void)0)
#define __ensures(...) ((void)0)
#define __assume(...) ((void)0)
#define __requires_fresh_array(...) ((void)0)
#define __axiom(...) static_assert(true, "")
#define __invariant(...) true
#define __global_invariant(...) true
#define __no_read(...) true
#define __implies(a, b) (!(a) || (b))
#define __other_int(x) (~(x))
#undef __all
#define __all(...) (__VA_ARGS__)
#define NULL 0
using uint = unsigned;
#define synchronize(group) (group).sync()
__device__ inline void *copy_bytes(void *to, const void *from, size_t n) { return memcpy(to, from, n); }
__device__ inline void *fill_bytes(void *to, int value, size_t n) { return memset(to, value, n); }
#define __builtin_memcpy copy_bytes
#define __builtin_memset fill_bytes
#line 1 "kernel.cu"
"""


@dataclass(frozen=True)
class Inputs:
    """What a test's kernel is given, where that is not zeros and arrays of zeros.

    Attributes
    ----------
    values
        By the argument's position.
    functions
        Names of device functions, likewise.
    pointers
        Where in the array of an argument the address of another array stands, bytes.
    zeroed
        A variable that the host sets to zeros before the launch.
    """

    values: dict[int, int] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    pointers: dict[int, int] = field(default_factory=dict)
    zeroed: str = ""


_HALVE = {1: "divideByTwo"}
_PARAMETERS = 4 * 1024 + 8  # where the state of a Mersenne twister holds the address of its parameters
INPUTS: dict[str, Inputs] = {
    "function_pointers/basic_argument_fail": Inputs({1: 0, 2: 1024}),  # any function, so none
    "function_pointers/basic_argument_pass": Inputs({2: 1024}, _HALVE),
    "function_pointers/basic_assignment_fail": Inputs({1: 1024, 2: 3}),
    "function_pointers/basic_assignment_pass": Inputs({1: 1024, 2: 2}),
    "function_pointers/basic_statement": Inputs({1: 1}),
    "function_pointers/funcptr_lt": Inputs({3: 1024}, {1: "divideByTwo", 2: "multiplyByTwo"}),
    "function_pointers/funcptr_to_ptr": Inputs({2: 1024, 3: 1}, _HALVE),
    "function_pointers/funcptr_to_ptr_add": Inputs({2: 1024, 3: 0}, _HALVE),
    "function_pointers/pass_struct/call": Inputs({1: 0, 2: 1024}),
    "function_pointers/pass_struct/requires": Inputs({2: 1024}, _HALVE),
    "function_pointers/pass_struct/requires_call": Inputs({2: 1024}, _HALVE),
    "function_pointers/return_value": Inputs({1: 1024, 2: 1}),
    "curand_tests/fail/curand_mtgp32_block_race": Inputs(pointers={0: _PARAMETERS}),
    "curand_tests/fail/curand_mtgp32_race": Inputs(pointers={0: _PARAMETERS}),
    "curand_tests/pass/curand_mtgp32": Inputs(pointers={0: _PARAMETERS}),
    "globalarray/fail": Inputs(zeroed="A"),
    "memcpy/unhandled_varlen": Inputs({2: 12}),
    "misc/fail/miscfail2": Inputs({5: 13, 6: 143}),
    "misc/fail/miscfail3": Inputs({1: 1}),
    "misc/fail/miscfail4": Inputs({1: 1}),
    "misc/pass/misc1": Inputs({0: 143}),
    "misc/pass/misc4": Inputs({0: 2048, 1: 0}),
    "param_values/value_causing_race": Inputs({1: 185}),
    "param_values/value_in_assert": Inputs({0: 12, 1: 36, 2: 48}),
    "reduced_strength_with_requires": Inputs({1: 1024}),
}

_RACE, _ADDRESS, _BARRIER, _ASSERT, _CALL = "racecheck", "memcheck", "synccheck", "assertion", "no-function"
_ENDLESS = "no-end"

# What a test that must fail fails by, where that is no race.
CAUSES: dict[str, str] = {
    "atomics/test_abstraction_enforced": _ASSERT,
    "cooperative_groups/fail/block_divergence_grid_group": _ENDLESS,
    "cooperative_groups/fail/divergence_grid_group": _BARRIER,
    "cooperative_groups/fail/divergence_thread_block": _BARRIER,
    "function_pointers/basic_argument_fail": _CALL,
    "function_pointers/basic_assignment_fail": _CALL,
    "function_pointers/constant_value": _CALL,
    "function_pointers/funcptr_to_ptr_add": _CALL,
    "function_pointers/pass_struct/call": _CALL,
    "function_pointers/soundness_issue": _ASSERT,
    "memcpy/null_dst": _ADDRESS,
    "memcpy/null_src": _ADDRESS,
    "memset/null_dst": _ADDRESS,
    "misc/fail/miscfail5": _ADDRESS,
    "misc/fail/miscfail8": _ASSERT,
    "misc/pass/misc3": _ADDRESS,
    "param_values/value_in_assert": _ASSERT,
}

_LOCKSTEP = "lanes of a warp do not run in lockstep: nothing orders their accesses without __syncwarp()"
_SAME_VALUE = "threads that write the same value race by PTX's model; the verifier lets them"
_VERIFIER = "the label is about what the verifier can read or prove; no run of the kernel does anything wrong"

# Labels that say something other than CUDA's rules do: what is to be found, and why.
EXPLAINED: dict[str, tuple[str, str]] = {
    "annotation_tests/test_axiom": (_RACE, "an axiom of the verifier's says which block there is; a launch has others"),
    "curand_tests/fail/curand_mtgp32_block_race": (
        f"{_RACE} {_BARRIER}",
        "all threads of a block must call the generator, which has barriers; one thread does",
    ),
    "function_pointers/unknown_function": ("", _VERIFIER),
    "memset/unhandled_varlen": ("", _VERIFIER),
    "memset/unhandled_varval": ("", _VERIFIER),
    "misc/fail/miscfail2": ("", _VERIFIER),
    "misc/fail/miscfail7": ("", "the verifier takes an array's address for one that may be null"),
    "pointertests/test12": (_RACE, _SAME_VALUE),
    "pointertests/test_copy_between_memory_spaces": (_RACE, _SAME_VALUE),
    "pointertests/test_copy_between_pointers": (_RACE, _SAME_VALUE),
    "warpsync/2d": (_RACE, _LOCKSTEP),
    "warpsync/intragroup_scan": (_RACE, _LOCKSTEP),
    "warpsync/scan_warp": (_RACE, _LOCKSTEP),
    "warpsync/shuffle": (_RACE, _LOCKSTEP),
}

# Tests that are no kernel of CUDA as it is today.
NOT_PORTABLE: dict[str, str] = {
    "argument_promotion": "texture references are gone from CUDA 12 on",
    "ctimeslid": "64 KiB of static shared memory: it does not load",
    "memcpy_simplification/global_passed_to_call": "texture references are gone from CUDA 12 on",
    "misc/fail/miscfail1": "does not compile, which is its label",
    "misc/fail/miscfail6": "an array without elements, which CUDA C++ refuses",
    "return_val/char": "has no kernel",
    "return_val/longlong": "has no kernel",
}


@dataclass(frozen=True)
class Test:
    """One test of the suite: its text, whether GPUVerify must find something, and its launch."""

    name: str
    text: str
    fails: bool
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    defines: tuple[str, ...]


def _shape(text: str, option: str, limit: int) -> tuple[int, int, int]:
    """Return what ``--blockDim=64`` or ``--gridDim=[8,8]`` says, halved until it is a launch that we make."""
    sizes = [int(size) for size in re.search(rf"--{option}=\[?([\d,]+)", text)[1].split(",")]
    sizes += [1] * (3 - len(sizes))
    while np.prod(sizes) > limit:
        sizes[int(np.argmax(sizes))] //= 2
    return sizes[0], sizes[1], sizes[2]


def tests(folder: Path) -> list[Test]:
    """Return the tests of a checkout."""
    root = folder / "testsuite" / "CUDA"
    found = []
    for path in sorted(root.rglob("kernel.cu")):
        text = path.read_text()
        label, launch = next(line for line in text.splitlines() if line.startswith("//")), text
        found.append(
            Test(
                str(path.parent.relative_to(root)),
                text,
                not label.lower().startswith("//pass"),
                _shape(launch, "gridDim", _MAX_BLOCKS),
                _shape(launch, "blockDim", _MAX_THREADS),
                tuple(re.findall(r"^//--.*?-D(\w+=\w+)", text, re.MULTILINE)),
            )
        )
    return found


def _source(test: Test) -> str:
    text = re.sub(r'#include [<"]cuda\.h[>"]', "", test.text)
    extra = []  # what the suite leaves undefined: any function will do
    if nondet := re.search(r"__device__ (\w+) nondet\(", text):
        extra.append(f"__device__ {nondet[1]} nondet() {{ return (clock() * 2654435761u >> 9 & 3) == 0; }}")
    bar = re.search(r"^__device__ (\w+) bar\(([\w ]*)\);", text, re.MULTILINE)
    if bar and not re.search(r"^__device__ \w+ bar\([\w ]*\)\s*\{", text, re.MULTILINE):
        body = "return 8;" if bar[1] != "void" else ""
        extra.append(f"__device__ {bar[1]} bar({bar[2]}) {{ {body} }}")
    functions = INPUTS.get(test.name, Inputs()).functions
    extra += [f"__device__ funcType pointer_{position} = {name};" for position, name in functions.items()]
    headers = [f"#include <{name}.h>\n" for name, word in _HEADERS.items() if word in text]
    return "".join(headers) + WORDS + text + "\n" + "\n".join(extra)


def ptx_of(source: str, options: Sequence[str]) -> bytes:
    """Compile; raises RuntimeError with the compiler's first message."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        errors = [line for line in log.decode().splitlines() if "error" in line]
        raise RuntimeError(errors[0] if errors else status.name)
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    error, *values = function(*arguments)
    if error:
        raise RuntimeError(error.name)
    return values[0] if values else None


def run(test: Test, include: Sequence[str]) -> None:
    """Compile and launch a test's kernel. Raises RuntimeError with the driver's error."""
    from cuda.bindings import driver

    options = ["-G", "-default-device", "-std=c++17", "-arch=compute_90", *(f"-I{path}" for path in include)]
    ptx = ptx_of(_source(test), [*options, *(f"-D{one}" for one in test.defines)])
    name = re.findall(rb"\.visible \.entry (\w+)\(", ptx)
    module = call(driver.cuModuleLoadData, ptx)
    function = call(driver.cuModuleGetFunction, module, name[0])
    inputs = INPUTS.get(test.name, Inputs())

    def array() -> int:
        address = call(driver.cuMemAlloc, _SIZE)
        call(driver.cuMemsetD8, address, 0, _SIZE)
        return int(address)

    arguments = []
    position = 0
    while True:
        error, _, size = driver.cuFuncGetParamInfo(function, position)
        if error:
            break
        if position in inputs.values:
            arguments.append(np.full(size // 4 or 1, 0, np.uint32))
            arguments[-1][0] = inputs.values[position]
        elif position in inputs.functions:
            address, _ = driver.cuModuleGetGlobal(module, f"pointer_{position}".encode())[1:]
            arguments.append(np.zeros(1, np.uint64))
            call(driver.cuMemcpyDtoH, arguments[-1].ctypes.data, address, 8)
        elif size % 8 == 0:  # pointers, alone or in a structure
            arguments.append(np.array([array() for _ in range(size // 8)], np.uint64))
            if position in inputs.pointers:
                pointer = np.array([array()], np.uint64)
                call(driver.cuMemcpyHtoD, int(arguments[-1][0]) + inputs.pointers[position], pointer.ctypes.data, 8)
        else:
            arguments.append(np.zeros(size, np.uint8))
        position += 1
    if inputs.zeroed:
        _, address, size = driver.cuModuleGetGlobal(module, inputs.zeroed.encode())
        call(driver.cuMemsetD8, address, 0, size)
    places = np.array([one.ctypes.data for one in arguments], np.uint64)
    start = driver.cuLaunchCooperativeKernel if "grid_group" in test.text else driver.cuLaunchKernel
    more = () if start is driver.cuLaunchCooperativeKernel else (0,)
    call(start, function, *test.grid, *test.block, 0, 0, places.ctypes.data, *more)
    call(driver.cuCtxSynchronize)


FAILURES = {"CUDA_ERROR_ASSERT": _ASSERT, "CUDA_ERROR_LAUNCH_FAILED": _CALL, "CUDA_ERROR_LAUNCH_TIMEOUT": _ENDLESS}


def outcome(test: Test, include: Sequence[str]) -> Outcome:
    """Run a test; what ends its kernel counts as found."""
    expected = CAUSES.get(test.name, _RACE) if test.fails else ""
    expected = EXPLAINED[test.name][0] if test.name in EXPLAINED else expected
    one = attempt(test.name, frozenset(expected.split()), lambda device: run(test, include), CHECKS)
    if one.error in FAILURES:
        one = replace(one, found=one.found | {FAILURES[one.error]}, error="")
    return one


def table(outcomes: Sequence[Outcome]) -> None:
    ran = [one for one in outcomes if not one.error]
    found = sum(bool(one.expected) and one.expected <= one.found for one in ran)
    missed = [one for one in ran if not one.expected <= one.found]
    false = [one for one in ran if one.found - one.expected]
    silent = sum(not one.expected and not one.found for one in ran)
    print(f"{len(ran)} kernels: found {found}, missed {len(missed)}, false {len(false)}, rightly silent {silent}")
    for title, ones in (("missed", missed), ("false", false)):
        for one in ones:
            print(f"{title}: {one.name}: expected {sorted(one.expected)}, found {sorted(one.found)}")
    for one in outcomes:
        if one.error:
            print(f"not run: {one.name}: {one.error}")


def _reasons(all_tests: Sequence[Test]) -> None:
    print("\n| test | label | expected | why |\n|---|---|---|---|")
    labels = {test.name: "fail" if test.fails else "pass" for test in all_tests}
    for name, (expected, why) in EXPLAINED.items():
        print(f"| {name} | {labels[name]} | {expected or 'nothing'} | {why} |")
    print("\n| not run | why |\n|---|---|")
    for name, why in NOT_PORTABLE.items():
        print(f"| {name} | {why} |")


def main() -> int:
    """Run the command line; return the exit code: 1 if something is missed or false."""
    from cudatool.runtime.nvrtc import include_paths

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of mc-imperial/gpuverify")
    parser.add_argument(
        "--curand", metavar="INCLUDE", help="directory of curand_kernel.h; without it its tests are left out"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="tests whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="take only every N-th test")
    parser.add_argument(
        "--reasons", action="store_true", help="print why some labels are read differently, as Markdown"
    )
    options = parser.parse_args()
    include = [*include_paths(), *([options.curand] if options.curand else [])]
    suite = tests(options.folder)
    chosen = [test for test in suite if options.only in test.name and test.name not in NOT_PORTABLE]
    chosen = [test for test in chosen if options.curand or "curand" not in test.text][:: options.every]
    if not chosen:
        parser.error(f"no such tests in {options.folder}")
    _driver.choose("sim")
    for name in ("cuda.core", "cuda.bindings.driver", "cuda.bindings.nvrtc", "llvmlite.binding"):
        importlib.import_module(name)  # once, for all processes to come
    outcomes = []
    for test in chosen:
        outcomes.append(outcome(test, include))
        print(outcomes[-1], file=sys.stderr, flush=True)
    table(outcomes)
    if options.reasons:
        _reasons(suite)
    return int(any(one.expected != one.found for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
