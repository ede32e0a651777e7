"""Triton kernels of public projects on the device at hand: their numbers, and what a run costs.

    python benchmarks/bench_triton.py CHECKOUTS --save SIM.npz [--jobs N] [--only TEXT]     # on each device
    python benchmarks/bench_triton.py CHECKOUTS --interpreter --save INTERPRETED.npz
    python benchmarks/bench_triton.py --compare SIM.npz GPU.npz
    python benchmarks/bench_triton.py --costs SIM.npz INTERPRETED.npz

CHECKOUTS is a folder with clones of the projects, or links to them, named as triton_projects.py says. Needs
PyTorch and Triton. On a machine without a GPU the kernels run on the software device, in PyTorch's tensors in the
host's memory, and with ``--interpreter`` in Triton's own interpreter. Each case runs in a process of its own.

A case runs a project's own function with fixed inputs, backward too where it has gradients. What is kept of each result
is its shape, its norm, 64 of its elements and a checksum of its bytes. Two devices agree where the difference of the
norms and that of the elements, over their root mean square, stay below the case's tolerance; integers must be equal.
Of a kernel's configurations for the autotuner only the first is taken, so that all devices run the same one.

A cost is the processor time of the calls of kernels, with all that Triton does for them: of the first, which compiles,
and of the fastest of `--rounds` more. What PyTorch does between the kernels does not count.
"""

from __future__ import annotations

import argparse
import base64
import io
import lzma
import math
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 64
_INTEGERS = "iub"


# ---- one case, in a process of its own ----


def run_case(name: str, checkouts: Path, rounds: int) -> dict[str, Any]:
    """Run a case on the device at hand; return what it gave, as arrays by name."""
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)  # others would go on spinning, and be counted, while a kernel runs
    if not torch.cuda.is_available():
        import cudatool

        # In the interpreter, too: programs ask the device's driver for where tensors are.
        os.environ.setdefault("CUDATOOL_DEVICE", f"sim:threads={os.cpu_count() or 1},memory=4GiB")
        assert cudatool.get_device_name().startswith("cudatool software device")
    import triton_cases

    _take_the_first_configuration()
    triton_cases.prepare(checkouts)
    clock = Clock(interpreted)
    trial = triton_cases.CASES[name].make(triton_cases.Inputs())
    results, first = clock.timed(trial.run)
    again = [clock.timed(trial.run)[1] for _ in range(rounds)]
    expected = trial.expect()
    kept: dict[str, Any] = {"first_s": first, "again_s": min(again, default=math.nan), "kernels": clock.launches}
    if expected is not None:
        kept["error"] = max(
            (_error(_numbers(a), _numbers(b)) for a, b in zip(results, expected, strict=True)), default=math.nan
        )
    for number, result in enumerate(results):
        kept.update({f"{number}/{key}": value for key, value in summary(result).items()})
    return kept


class Clock:
    """Counts the processor time of Triton's launches."""

    def __init__(self, interpreted: bool) -> None:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        self.spent = 0.0
        self.launches = 0
        launch = (owner := InterpretedFunction if interpreted else JITFunction).run

        def run(*arguments: Any, **named: Any) -> Any:
            before = time.process_time()
            try:
                return launch(*arguments, **named)
            finally:
                self.spent += time.process_time() - before
                self.launches += 1

        owner.run = run

    def timed(self, function: Callable[[], Any]) -> tuple[Any, float]:
        """Return what `function` returns, and the seconds that its launches took."""
        self.spent, self.launches = 0.0, 0
        return function(), self.spent


def _take_the_first_configuration() -> None:
    from triton.runtime.autotuner import Autotuner

    start = Autotuner.__init__

    def first_only(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        start(self, fn, arg_names, configs[:1], *rest, **named)

    Autotuner.__init__ = first_only


def _numbers(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor as a NumPy array of a type that NumPy has."""
    import torch

    tensor = tensor.detach().cpu()
    if not tensor.dtype.is_floating_point:
        return np.asarray(tensor)
    return np.asarray(tensor.to(torch.float64))


def _error(ours: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    ours, expected = ours.astype(np.float64), expected.astype(np.float64)
    if ours.shape != expected.shape:
        return math.inf
    same = (ours == expected) | (np.isnan(ours) & np.isnan(expected))
    difference = np.linalg.norm(np.where(same, 0, ours - expected))
    return float(difference / (np.linalg.norm(np.where(same & ~np.isfinite(expected), 0, expected)) or 1))


def summary(tensor: Any) -> dict[str, Any]:
    """Return what is kept of a tensor."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    numbers = _numbers(flat)
    picked = np.unique(np.linspace(0, numbers.size - 1, SAMPLES).astype(np.int64)) if numbers.size else []
    finite = np.where(np.isfinite(numbers), numbers, 0).astype(np.float64)
    return {
        "shape": np.asarray(tensor.shape),
        "norm": np.asarray(np.linalg.norm(finite)),
        "sample": numbers[picked].astype(np.float32 if numbers.dtype.kind == "f" else np.int64),
        "crc": np.asarray(zlib.crc32(flat.view(torch.uint8).numpy().tobytes())),
    }


# ---- all cases ----


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cases whose name has `options.only` in it; return what all gave."""
    import triton_cases

    names = [name for name in triton_cases.CASES if options.only in name]
    kept: dict[str, Any] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, (case, failure) in zip(names, pool.map(lambda n: _in_a_process(n, options), names), strict=True):
            kept.update({f"{name}/{key}": value for key, value in case.items()})
            if failure:
                kept[f"{name}/failure"] = np.asarray(failure)
            print(_line(name, case, failure, triton_cases.CASES[name].tolerance), file=sys.stderr, flush=True)
    return kept


def _in_a_process(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return what a case gave, and how it failed, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "case.npz"
        environment = os.environ | ({"TRITON_INTERPRET": "1"} if options.interpreter else {})
        command = [sys.executable, __file__, str(options.checkouts), "--case", name, "--save", str(saved)]
        try:
            ran = subprocess.run(
                [*command, "--rounds", str(options.rounds)],
                env=environment,
                timeout=options.timeout,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {}, f"took longer than {options.timeout} s"
        if not saved.exists():
            if options.verbose:
                print(ran.stderr[-4000:], file=sys.stderr)
            return {}, (ran.stderr.strip().splitlines() or [f"ended with status {ran.returncode}"])[-1][:300]
        with np.load(saved) as case:
            return dict(case), ""


def _line(name: str, case: dict[str, Any], failure: str, tolerance: float) -> str:
    if failure:
        return f"{name:44} FAILED: {failure}"
    error = float(case["error"]) if "error" in case else math.nan
    verdict = "" if math.isnan(error) or error <= tolerance else f"  WRONG (tolerance {tolerance:g})"
    return (
        f"{name:44} {int(case['kernels']):4} launches  first {float(case['first_s']):7.2f} s  "
        f"again {float(case['again_s']) * 1e3:9.2f} ms  error {error:8.1e}{verdict}"
    )


# ---- comparing ----


def _cases(saved: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    grouped: dict[str, dict[str, Any]] = {}
    for key in saved:
        project, name, rest = key.split("/", 2)
        grouped.setdefault(f"{project}/{name}", {})[rest] = saved[key]
    yield from grouped.items()


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return by how much the results of a case differ: 0 where all bytes are equal, infinity where they cannot be."""
    numbers = sorted({key.split("/")[0] for key in one if "/" in key})
    if numbers != sorted({key.split("/")[0] for key in other if "/" in key}):
        return math.inf
    worst = 0.0
    for number in numbers:
        a, b = ({key: each[f"{number}/{key}"] for key in ("shape", "norm", "sample", "crc")} for each in (one, other))
        if not np.array_equal(a["shape"], b["shape"]):
            return math.inf
        if a["crc"] == b["crc"]:
            continue
        if a["sample"].dtype.kind in _INTEGERS:
            return math.inf
        scale = float(b["norm"]) / math.sqrt(max(1, int(np.prod(b["shape"])))) or 1.0
        same = (a["sample"] == b["sample"]) | (np.isnan(a["sample"]) & np.isnan(b["sample"]))
        apart = np.where(same, 0, a["sample"].astype(np.float64) - b["sample"])
        rms = float(np.sqrt(np.mean(apart**2))) / scale if apart.size else 0.0
        norms = abs(float(a["norm"]) - float(b["norm"])) / (float(b["norm"]) or 1.0)
        worst = max(worst, norms, rms if math.isfinite(rms) else math.inf)
    return worst


def compare(first: Path, second: Path) -> int:
    """Print by how much the results of two devices differ; return 1 if one is beyond its case's tolerance."""
    import triton_cases

    one, other = dict(_cases(np.load(first))), dict(_cases(np.load(second)))
    names = sorted((one.keys() | other.keys()) & triton_cases.CASES.keys())
    bad = 0
    for name in names:
        both = [each.get(name, {"failure": "not run"}) for each in (one, other)]
        failures = [str(each["failure"]) for each in both if "failure" in each]
        if failures:
            bad += 1
            print(f"{name:44} NOT COMPARED: {'; '.join(failures)}")
            continue
        apart, tolerance = difference(both[0], both[1]), triton_cases.CASES[name].tolerance
        equal = "equal" if apart == 0 else f"{apart:.1e}"
        bad += apart > tolerance
        print(f"{name:44} {equal:>8}  tolerance {tolerance:g}{'  DIFFERS' if apart > tolerance else ''}")
    print(f"{len(names)} cases, {bad} not within their tolerance")
    return bool(bad)


def costs(first: Path, second: Path) -> int:
    """Print what the kernels of each case cost in two runs, and how many times more in the second."""
    one, other = dict(_cases(np.load(first))), dict(_cases(np.load(second)))
    ratios = []
    for name in sorted(one.keys() & other.keys()):
        if "failure" in one[name] or "failure" in other[name]:
            print(f"{name:44} {one[name].get('failure', 'ran')} / {other[name].get('failure', 'ran')}")
            continue
        a, b = (float(each["again_s"] if each["again_s"] > 0 else each["first_s"]) for each in (one[name], other[name]))
        b = float(other[name]["first_s"]) if math.isnan(b) else b
        ratios.append(b / a)
        print(f"{name:44} {a * 1e3:10.2f} ms {b * 1e3:12.2f} ms {b / a:9.1f}")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{len(ratios)} cases, geometric mean {mean:.1f}, {sum(r >= 100 for r in ratios)} of 100 and more")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="?", help="folder with the projects' clones")
    parser.add_argument("--save", type=Path, help="file for what is kept of the results (.npz)")
    parser.add_argument("--print", action="store_true", help="print that file, compressed (xz) and in base64")
    parser.add_argument("--only", default="", help="run cases with this text in their name")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--rounds", type=int, default=3, help="runs after the first")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a case")
    parser.add_argument("--interpreter", action="store_true", help="run in Triton's interpreter")
    parser.add_argument("--verbose", action="store_true", help="print what a failing case wrote")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE")
    parser.add_argument("--costs", type=Path, nargs=2, metavar="FILE")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    if options.costs:
        return costs(*options.costs)
    if options.checkouts is None:
        parser.error("name the folder with the projects' clones")
    kept = run_case(options.case, options.checkouts, options.rounds) if options.case else run_all(options)
    if options.save:
        np.savez_compressed(options.save, **kept)
    if options.print:
        buffer = io.BytesIO()
        np.savez(buffer, **kept)
        print(base64.b64encode(lzma.compress(buffer.getvalue())).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
