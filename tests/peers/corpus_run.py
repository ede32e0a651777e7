"""Run a bundle of kernel launches on whatever device there is, and compare the results of two devices.

    python tests/peers/corpus_run.py --run BUNDLE RESULTS.npz [--only NAME...]
    python tests/peers/corpus_run.py --compare RESULTS.npz OTHER.npz [--bundle BUNDLE] [--markdown]

A bundle is a folder that needs no network and no compiler:

- ``manifest.json``: ``{"cases": [{"name", "program", "ptx", "kernel", "grid", "block", "arguments", ...}]}``, with
  optional ``shared_bytes``, ``cooperative``, ``globals`` and the tolerances ``rtol``, ``atol`` (default 0: bit for bit)
  and ``order`` (``"any"``: the elements of an array agree after sorting);
- the PTX files that ``ptx`` names, and ``inputs/NAME.npz`` with what ``arguments`` and ``globals`` name: arrays become
  device memory, zero-dimensional arrays are passed by value, and ``globals`` are written to the module's variables.

``--run`` launches through cuda.core on the device that ``CUDATOOL_DEVICE`` chooses and keeps what every array holds
afterwards. A case runs in a process that the next one shares only if it went well. ``--compare`` tells per case
whether the arrays agree. Exit code: 0 all ran or agree, 1 some did not, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Case", "agreement", "cases_of", "main"]

_TIMEOUT_S = 300
_ERRORS = "errors"  # the key in a results file that holds {case: message} as JSON


@dataclass(frozen=True, slots=True)
class Case:
    """One launch of a bundle; the module's docstring says what the fields mean."""

    name: str
    program: str
    ptx: str
    kernel: str
    grid: list[int]
    block: list[int]
    arguments: list[str]
    globals: list[str] = field(default_factory=list)
    shared_bytes: int = 0
    cooperative: bool = False
    rtol: float = 0.0
    atol: float = 0.0
    order: str = ""


def cases_of(bundle: Path) -> list[Case]:
    """Read a bundle's manifest. Raises OSError, ValueError or TypeError if there is none or it is not one."""
    return [Case(**entry) for entry in json.loads((bundle / "manifest.json").read_text())["cases"]]


# ---- running ----


def _launch(bundle: Path, case: Case) -> dict[str, NDArray[Any]]:
    """Launch a case and return what its arrays hold afterwards."""
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    def check(status: driver.CUresult, *values: Any) -> Any:
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(driver.CUresult(status).name)
        return values[0] if values else None

    device = Device()
    device.set_current()
    stream = device.create_stream()
    module = ObjectCode.from_ptx((bundle / case.ptx).read_bytes())
    kernel = module.get_kernel(case.kernel)
    with np.load(bundle / "inputs" / f"{case.name}.npz") as file:
        inputs = {name: file[name] for name in file.files}
    targets: dict[str, int] = {}
    for name in case.globals:
        address, size = check(*_pair(driver.cuLibraryGetGlobal(module.handle, name.encode())))
        if size < inputs[name].nbytes:
            raise RuntimeError(f"{name} has {size} bytes, {inputs[name].nbytes} given")
        targets[name] = int(address)
    buffers = {
        name: device.memory_resource.allocate(inputs[name].nbytes, stream=stream)
        for name in dict.fromkeys(case.arguments)
        if inputs[name].ndim
    }
    targets.update((name, int(buffer.handle)) for name, buffer in buffers.items())
    stream.sync()
    for name, address in targets.items():
        host = np.ascontiguousarray(inputs[name])
        check(*driver.cuMemcpyHtoD(address, host.ctypes.data, host.nbytes))
    arguments = [buffers[name] if name in buffers else inputs[name][()] for name in case.arguments]
    config = LaunchConfig(
        grid=tuple(case.grid),
        block=tuple(case.block),
        shmem_size=case.shared_bytes,
        is_cooperative=case.cooperative,
    )
    launch(stream, config, kernel, *arguments)
    stream.sync()
    results = {}
    for name, address in targets.items():
        results[name] = np.empty_like(inputs[name])
        check(*driver.cuMemcpyDtoH(results[name].ctypes.data, address, results[name].nbytes))
    for buffer in buffers.values():
        buffer.close(stream)
    stream.close()
    return results


def _pair(result: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    return result[0], result[1:]


def _worker(bundle: Path, out: Path, names: list[str]) -> None:
    """Run the cases named, a file each in `out`, until one fails."""
    from cudatool import _driver

    _driver.initialize()
    cases = {case.name: case for case in cases_of(bundle)}
    for name in names:
        np.savez_compressed(out / f"{name}.npz", allow_pickle=False, **_launch(bundle, cases[name]))


def _run(bundle: Path, results: Path, only: list[str]) -> int:
    names = [case.name for case in cases_of(bundle) if not only or case.name in only]
    if not names:
        print(f"{bundle}: no such cases", file=sys.stderr)
        return 2
    errors: dict[str, str] = {}
    arrays: dict[str, NDArray[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pending = names
        while pending:
            late = False
            command = [sys.executable, __file__, "--worker", str(bundle), folder, *pending]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
                problem = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
            except subprocess.TimeoutExpired:
                problem = f"takes more than {_TIMEOUT_S} s"
                late = True
            ended = [name for name in pending if (Path(folder) / f"{name}.npz").exists()]
            failed = next((name for name in pending if name not in ended), None)
            if late and ended:
                failed = None  # the time was for all of them: the rest gets its own
            if failed is not None:
                errors[failed] = problem
                print(f"{failed}: {problem}", file=sys.stderr)
            pending = [name for name in pending if name not in ended and name != failed]
        for name in names:
            if name not in errors:
                with np.load(Path(folder) / f"{name}.npz") as file:
                    arrays.update({f"{name}/{key}": file[key] for key in file.files})
    unchanged = _unchanged(bundle, names, arrays)
    for name in unchanged:
        print(f"{name}: no array changed", file=sys.stderr)
    np.savez_compressed(results, allow_pickle=False, **arrays, **{_ERRORS: np.array(json.dumps(errors))})
    print(f"{len(names) - len(errors)} of {len(names)} cases ran. Wrote {results} ({results.stat().st_size} bytes)")
    return 1 if errors or unchanged else 0


def _unchanged(bundle: Path, names: list[str], arrays: dict[str, NDArray[Any]]) -> list[str]:
    """Return the cases that ran and left every array as it was: they test nothing."""
    changed = set()
    for key, array in arrays.items():
        name, _, argument = key.rpartition("/")
        with np.load(bundle / "inputs" / f"{name}.npz") as file:
            if file[argument].tobytes() != array.tobytes():
                changed.add(name)
    return [name for name in names if name not in changed and any(key.startswith(f"{name}/") for key in arrays)]


# ---- comparing ----


def agreement(case: Case, ours: NDArray[Any], theirs: NDArray[Any]) -> tuple[bool, float]:
    """Return whether two arrays agree within the case's tolerance, and their largest difference.

    The second is 0 for equal bits, otherwise the largest |a - b| / max(|b|, 1), NaN being equal to NaN.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False, np.inf
    if ours.tobytes() == theirs.tobytes():
        return True, 0.0
    a, b = ours.ravel(), theirs.ravel()
    if case.order == "any":
        a, b = np.sort(a), np.sort(b)
        if a.tobytes() == b.tobytes():
            return True, 0.0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    difference = np.where(equal, 0.0, np.inf)  # where one is infinite or NaN and the other is not
    difference[finite] = np.abs(a[finite] - b[finite])
    size = np.where(finite, np.abs(b), 0.0)
    within = np.all(difference <= case.atol + case.rtol * size)
    return bool(within), float(np.max(difference / np.maximum(size, 1.0)))


def _compare(first: Path, second: Path, bundle: Path | None, markdown: bool) -> int:
    with np.load(first) as file:
        ours = {name: file[name] for name in file.files}
    with np.load(second) as file:
        theirs = {name: file[name] for name in file.files}
    errors = [json.loads(str(one.pop(_ERRORS))) for one in (ours, theirs)]
    known = {case.name: case for case in cases_of(bundle)} if bundle else {}
    names = list(dict.fromkeys([*(key.rpartition("/")[0] for key in (*ours, *theirs)), *errors[0], *errors[1]]))
    agreed = exact = 0
    lines = []
    for name in names:
        case = known.get(name) or Case(name, "", "", "", [], [], [])
        problem = errors[0].get(name) or errors[1].get(name)
        if problem is None:
            keys = [key for key in (*ours, *theirs) if key.rpartition("/")[0] == name]
            if missing := [key for key in keys if key not in ours or key not in theirs]:
                problem = f"only one file has {missing[0]}"
        if problem is not None:
            lines.append((name, case.program, "failed", problem))
            continue
        found = [agreement(case, ours[key], theirs[key]) for key in dict.fromkeys(keys)]
        worst = max(difference for _, difference in found)
        right = all(fine for fine, _ in found)
        agreed += right
        exact += right and worst == 0.0
        said = (
            "" if worst == 0 else f"largest difference {worst:.2g}, allowed {case.atol:g} + {case.rtol:g} of the value"
        )
        lines.append(
            (name, case.program, "bit for bit" if right and not said else "agrees" if right else "DIFFERS", said)
        )
    if markdown:
        print("| case | program | result | |\n|---|---|---|---|")
    for line in lines:
        print(
            f"| {' | '.join(line)} |" if markdown else "  ".join((f"{line[0]:28}", f"{line[2]:11}", line[3])).rstrip()
        )
    programs = len({line[1] for line in lines})
    print(f"{len(names)} cases of {programs} programs: {agreed} agree, {exact} of them bit for bit")
    return 0 if agreed == len(names) and names else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", nargs=2, type=Path, metavar=("BUNDLE", "RESULTS"))
    what.add_argument("--compare", nargs=2, type=Path, metavar=("RESULTS", "OTHER"))
    what.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these cases")
    parser.add_argument("--bundle", type=Path, help="where --compare finds the tolerances; without it: bit for bit")
    parser.add_argument("--markdown", action="store_true", help="print the comparison as a Markdown table")
    options = parser.parse_args(arguments)
    if options.worker:
        bundle, out, *names = options.worker
        _worker(Path(bundle), Path(out), names)
        return 0
    try:
        if options.run:
            return _run(*options.run, options.only)
        return _compare(*options.compare, options.bundle, options.markdown)
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"corpus_run: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
