"""Run cuda.core's own test suite on the software device, and say what passed, failed and was skipped, by cause.

    python tests/peers/cuda_core.py CHECKOUT [PYTEST ARGUMENTS ...]

CHECKOUT is a checkout of NVIDIA/cuda-python of the release that is installed (tag ``cuda-core-vX.Y.Z``), or its folders
``cuda_core/tests``, ``cuda_python_test_helpers`` and ``cuda_bindings/cuda/bindings/_test_helpers``. Arguments name tests
relative to ``cuda_core``; without any the whole suite runs. The suite needs pytest, cffi, cloudpickle and psutil.
``CUDATOOL_DEVICE`` chooses the machine; the default has three devices, so that tests of peers run.

The exit status is 1 if tests failed, 2 if the suite could not be run.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import site
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

_MACHINE: Final = "sim:count=3,memory=2GiB"

# What a test needs that the software device does not offer, by what its failure or skip says, or by where it stands.
_EXCLUDED: Final = (
    ("NVML, a library of NVIDIA's kernel driver", r"nvml|^tests/system/"),
    ("graphics interoperability", r"pyglet|^tests/test_graphics"),
    ("checkpoints of processes", r"^tests/test_checkpoint"),
    ("GPU machine code without PTX", r"load_rdc"),
    ("tensor maps (TMA)", r"\bTMA\b|im2col|^tests/test_tensor_map"),
    ("another package: CuPy, PyTorch, numba", r"cupy|torch|numba(?!.debug)"),
)


class _Outcomes:
    """A pytest plugin that keeps how each test ended, and why."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = self._reason(report)
        elif report.skipped:
            self.skipped[report.nodeid] = self._reason(report)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = self._reason(report)
        elif report.skipped:
            self.skipped[report.nodeid] = self._reason(report)

    @staticmethod
    def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
        if isinstance(report.longrepr, tuple):  # (file, line, "Skipped: why")
            return report.longrepr[2].removeprefix("Skipped: ")
        errors = re.findall(r"^E +(.+)$", report.longreprtext, re.MULTILINE)
        text = errors[0] if errors else report.longreprtext.strip().rpartition("\n")[2]
        return re.sub(r"0x[0-9a-fA-F]+|\b\d{4,}\b", "N", text)[:150]


def _cause(test: str, reason: str) -> str | None:
    """Return which excluded feature a test needs, None if none."""
    return next((cause for cause, pattern in _EXCLUDED if re.search(pattern, f"{test}\n{reason}", re.M | re.I)), None)


def _print_counts(title: str, reasons: Iterable[str]) -> None:
    print(f"\n{title}")
    for reason, count in Counter(reasons).most_common():
        print(f"{count:6}  {reason}")


def _report(outcomes: _Outcomes) -> None:
    excluded: dict[str, str] = {}
    for test, reason in {**outcomes.skipped, **outcomes.failed}.items():
        if cause := _cause(test, reason):
            excluded[test] = cause
    failed = {test: reason for test, reason in outcomes.failed.items() if test not in excluded}
    skipped = {test: reason for test, reason in outcomes.skipped.items() if test not in excluded}
    passed = outcomes.passed - failed.keys() - excluded.keys()
    _print_counts("Failed, by cause", failed.values())
    _print_counts("Failed, by file", (test.partition("::")[0] for test in failed))
    _print_counts("Skipped, by cause", skipped.values())
    _print_counts("Not counted: tests that need what the software device excludes", excluded.values())
    total = len(passed) + len(failed)
    print(f"\n{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped, {len(excluded)} not counted")
    if total:
        print(f"{100 * len(passed) / total:.1f} % of the {total} that ran")


def _interpreter(folder: Path) -> Path:
    """Make a virtual environment in which Python starts with the software device; return its interpreter.

    Processes that tests start must find the device before they load libcuda, even those that ignore PYTHONPATH.
    """
    real = Path(sys.executable).resolve()
    Path(folder, "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    packages = Path(folder, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    packages.mkdir(parents=True)
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    lines.append("import cudatool._driver; cudatool._driver.initialize()")
    Path(packages, "cudatool_device.pth").write_text("\n".join(lines) + "\n")
    interpreter = Path(folder, "bin", "python")
    interpreter.parent.mkdir()
    interpreter.symlink_to(real)
    return interpreter


def main(arguments: list[str]) -> int:
    """Run the suite; return the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    checkout = Path(arguments[0]).resolve()
    if not (checkout / "cuda_core" / "tests" / "conftest.py").exists():
        print(
            f"{checkout} is not a checkout of NVIDIA/cuda-python: it has no cuda_core/tests/conftest.py",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("CUDATOOL_DEVICE", _MACHINE)
    with tempfile.TemporaryDirectory() as folder:
        sys.executable = str(_interpreter(Path(folder)))
        multiprocessing.set_executable(sys.executable)
        from cudatool import _driver

        _driver.initialize()
        import cuda.bindings

        cuda.bindings.__path__.append(str(checkout / "cuda_bindings" / "cuda" / "bindings"))  # its _test_helpers
        if importlib.util.find_spec("numba_cuda") is None:
            sys.modules["numba"] = None  # its own CUDA target looks for the driver's functions in libcuda itself
        os.chdir(checkout / "cuda_core")
        outcomes = _Outcomes()
        options = ["-q", "--tb=short", "--no-showlocals", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
        options += ["--continue-on-collection-errors", "--ignore", "tests/system"]  # which is about NVML
        status = pytest.main([*options, *(arguments[1:] or ["tests"])], [outcomes])
    _report(outcomes)
    return {pytest.ExitCode.OK: 0, pytest.ExitCode.TESTS_FAILED: 1}.get(pytest.ExitCode(status), 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
