"""How the checkers do on programs with known bugs that we did not write.

    python tests/peers/checkers.py [--indigo DIR [--every N] [--graph FILE]] [--samples DIR] [--json FILE]

DIR of ``--indigo`` holds ``indigo_sources`` and ``input`` of the Indigo suite (JohnJacobsonIII/HiRace-Artifact-SC24):
the names of its programs say which bugs they have. DIR of ``--samples`` is a checkout of
NVIDIA/compute-sanitizer-samples. Their kernels are compiled as they are; what their hosts do is done here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cudatool import _driver, recording, sanitize
from cudatool.sanitize import FindingKind
from cudatool.trace import read

CHECKS = ("memcheck", "initcheck", "racecheck", "synccheck")
BUGS = {"boundsBug": "memcheck", "atomicBug": "racecheck", "guardBug": "racecheck", "raceBug": "racecheck"}
BUGS["syncBug"] = "racecheck"  # a barrier is missing


@dataclass(frozen=True)
class Outcome:
    """What was expected and found, as names of checkers."""

    name: str
    expected: frozenset[str]
    found: frozenset[str]
    error: str = ""


def checked(run: Callable[[Any], None], checks: tuple[str, ...] = CHECKS) -> tuple[frozenset[str], str]:
    """Return the checkers that found something in `run`, which gets a cuda.core device, and its error, if any.

    That a kernel ended in an error is the error: memcheck says so, too.
    """
    from cuda.core import Device

    error = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ctrace"
        with recording.record(path, checks=checks):
            device = Device()
            device.set_current()
            try:
                run(device)
                device.sync()
            except Exception as problem:  # whatever it is, it is the program's outcome
                error = (str(problem) or type(problem).__name__).splitlines()[0][:200]
        report = sanitize.check(read(path), ())
    return frozenset(one.check for one in report.on_device if one.kind is not FindingKind.KERNEL_ERROR), error


def launcher(device: Any, source: str, kernel: str) -> Callable[..., None]:
    """Compile `source` and return ``launch(grid, block, *arguments)``."""
    from cuda.core import LaunchConfig, Program, ProgramOptions, launch

    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}", lineinfo=True)
    code = Program(source, "c++", options).compile("ptx", name_expressions=(kernel,)).get_kernel(kernel)
    stream = device.default_stream

    def run(grid: int, block: int, *arguments: Any) -> None:
        launch(stream, LaunchConfig(grid=grid, block=block), code, *arguments)

    return run


def device_array(device: Any, values: np.ndarray) -> int:
    """Return the address of a copy of `values`, allocated by itself and never freed."""
    from cuda.bindings import driver

    error, address = driver.cuMemAlloc(max(values.nbytes, 1))
    assert not error, error
    assert not driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes)[0]
    return int(address)


# ---- Indigo ----


def indigo(folder: Path, every: int, graph: Path) -> list[Outcome]:
    """Run every N-th program of the suite on one graph."""
    words = np.fromfile(graph, np.int32)
    nodes, edges = int(words[0]), int(words[1])
    index, neighbours = words[2 : nodes + 3], words[nodes + 3 : nodes + 3 + edges]
    outcomes = []
    for path in sorted((folder / "indigo_sources").rglob("*.cu"))[::every]:
        expected = frozenset(BUGS[bug] for bug in re.findall(r"[a-z]+Bug", path.stem))
        text = path.read_text()
        source = text[text.index("typedef") : text.index("void serial_code")].replace('#include "indigo_cuda.h"', "")
        data_type = np.dtype(re.match(r"typedef (\w+) data_t", source)[1].replace("float", "float32"))

        def run(device: Any, source: str = source, data_type: np.dtype[Any] = data_type) -> None:
            # As indigo_cuda.h: two arrays of random values, the first of each zero.
            random, size = np.random.default_rng(1), max(nodes, edges, 1)
            data = [random.integers(0, limit, size).astype(data_type) for limit in (nodes, max(edges, 1))]
            for values in data:
                values[0] = 0
            arrays = [device_array(device, values) for values in (index, neighbours, *data)]
            launcher(device, source, "test_kernel")(nodes + 2, 64, *arrays, np.int32(nodes))

        outcomes.append(attempt(path.stem, expected, run))
    return outcomes


def attempt(
    name: str, expected: frozenset[str], run: Callable[[Any], None], checks: tuple[str, ...] = CHECKS
) -> Outcome:
    """Run a program in a process of its own: an error of a kernel would stay with the device."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what kernels print, and where the software device says it runs
        try:
            found, error = checked(run, checks)
            text = json.dumps([sorted(found), error])
        except BaseException as problem:
            text = json.dumps([[], f"{type(problem).__name__}: {problem}"])
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    found, error = json.loads(text) if text else ([], "the process died")
    return Outcome(name, expected, frozenset(found), error)


# ---- NVIDIA's samples ----


def samples(folder: Path) -> list[Outcome]:
    """Run the kernels of compute-sanitizer-samples with the launches of their hosts."""

    def kernels(path: str) -> str:
        """Return a source without its host part."""
        text = re.sub(r"^#include.*$", "", (folder / path).read_text(), flags=re.MULTILINE)
        return re.split(r"^(?:static void|int) \w+\(", text, flags=re.MULTILINE)[0]

    def nothing(count: int) -> np.ndarray:
        return np.zeros(count, np.int32)

    def memcheck(name: str) -> Callable[[Any], None]:
        return lambda device: launcher(device, kernels("Memcheck/memcheck_demo.cu"), name)(1, 1)

    def reduction(path: str, threads: int) -> Callable[[Any], None]:
        def run(device: Any) -> None:
            arrays = device_array(device, nothing(threads)), device_array(device, nothing(1))
            launcher(device, kernels(path), "sumKernel")(1, threads, *arrays)

        return run

    def divergent(device: Any) -> None:
        arrays = device_array(device, nothing(64 * 16 - 16)), device_array(device, nothing(1))
        launcher(device, kernels("Synccheck/divergent_threads.cu"), "myKernel")(1, 64, *arrays)

    def illegal_mask(device: Any) -> None:
        launcher(device, kernels("Synccheck/illegal_syncwarp.cu"), "myKernel")(1, 32, device_array(device, nothing(1)))

    def memset(device: Any) -> None:
        from cuda.bindings import driver

        _, address = driver.cuMemAlloc(4 * 64)
        driver.cuMemsetD8(address, 0, 64)  # bytes, where the program meant elements
        launcher(device, kernels("Initcheck/memset_error.cu"), "vectorAdd")(2, 32, int(address))

    cases: dict[str, tuple[str, Callable[[Any], None]]] = {
        "memcheck_demo: unaligned": ("memcheck", memcheck("unaligned_kernel")),
        "memcheck_demo: out of bounds": ("memcheck", memcheck("out_of_bounds_kernel")),
        "block_error": ("racecheck", reduction("Racecheck/block_error.cu", 128)),
        "warp_error": ("racecheck", reduction("Racecheck/warp_error.cu", 64)),
        "divergent_threads": ("synccheck", divergent),
        "illegal_syncwarp": ("synccheck", illegal_mask),
        "memset_error": ("initcheck", memset),
    }
    return [attempt(name, frozenset([check]), run) for name, (check, run) in cases.items()]


def table(title: str, outcomes: list[Outcome]) -> None:
    """Print found, missed and false alarms for each checker."""
    print(f"\n{title}: {len(outcomes)} programs")
    for check in CHECKS:
        counts = Counter((check in one.expected, check in one.found) for one in outcomes if not one.error)
        found, missed, false = counts[True, True], counts[True, False], counts[False, True]
        print(
            f"  {check:10} found {found:4}  missed {missed:4}  false alarms {false:4}  clean {counts[False, False]:4}"
        )
    for one in outcomes:
        if one.error:
            print(f"  {one.name}: {one.error}")
        elif one.expected != one.found:
            print(f"  {one.name}: expected {sorted(one.expected)}, found {sorted(one.found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--indigo", type=Path)
    parser.add_argument(
        "--graph",
        default="power_law_200n_1000e.egr",
        help="of the suite's inputs; its last vertex has no edges, or bugs stay hidden",
    )
    parser.add_argument("--every", type=int, default=1, help="take only every N-th program")
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.indigo and not options.samples:
        parser.error("name at least one of --indigo and --samples")
    _driver.choose("sim")
    results = {}
    if options.samples:
        results["compute-sanitizer-samples"] = samples(options.samples)
    if options.indigo:
        results["Indigo"] = indigo(options.indigo, options.every, options.indigo / "input" / options.graph)
    for title, outcomes in results.items():
        table(title, outcomes)
    if options.json:
        lists = {
            title: [
                {"name": o.name, "expected": sorted(o.expected), "found": sorted(o.found), "error": o.error}
                for o in all_
            ]
            for title, all_ in results.items()
        }
        options.json.write_text(json.dumps(lists, indent=1))


if __name__ == "__main__":
    sys.exit(main())
