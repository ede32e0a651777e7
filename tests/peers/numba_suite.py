"""Run numba-cuda's own test suite on the software device, and say what passed, failed and was skipped, by cause.

    python tests/peers/numba_suite.py [--json FILE] [--jobs N] [MODULE ...]

MODULE is a part of a test module's path below ``numba.cuda.tests``, such as ``cudapy/test_math``; without any all of
``cudadrv``, ``cudapy``, ``nrt``, ``nocuda`` and ``doc_examples`` run, each module in a process of its own. The suite
comes with numba-cuda; it needs ``numba-cuda[cu13]``, pytest, pytest-timeout, cffi, filecheck, ml_dtypes and psutil.
Tests of linking need files that numba-cuda's ``testing/Makefile`` builds (``GPU_CC=90``), in the directory that
``NUMBA_CUDA_TEST_BIN_DIR`` names, and ``cuobjdump`` on the path.

The exit status is 1 if tests failed, 2 if the suite could not be run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

_FOLDERS: Final = ("cudadrv", "cudapy", "nrt", "nocuda", "doc_examples")
_MACHINE: Final = "sim:count=2,memory=4GiB,threads=2"
_TEST_TIMEOUT_S: Final = 300

# What a test needs that the software device does not offer, by what its failure or skip says, or by where it stands.
_EXCLUDED: Final = (
    ("machine code (SASS): disassembly, inputs of a link that are nothing else", r"sass\b|nvdisasm|without PTX"),
    ("tensor maps (TMA)", r"tensormap"),
    ("another package: CuPy", r"cupy"),
    ("numba's own simulator", r"cudasim|simulator"),
    ("CUDA_VISIBLE_DEVICES, which speaks of GPUs", r"test_visible_devices_set_after_import"),
    ("numba-cuda 0.30.4 with cuda.bindings 13.5: no 'reserved' in CUipcMemHandle", r"no attribute 'reserved'"),
    ("numba-cuda 0.30.4 with numba 0.68: their caches stamp sources differently", r"CUDAAndCPUCachingTest"),
)


# ---- in the process of one test module -----------------------------------------------------------------------------


class _Outcomes(logging.Handler):
    """A pytest plugin that writes a line when a test begins and when it has ended, and why."""

    def __init__(self, path: Path, done: frozenset[str]) -> None:
        super().__init__(logging.WARNING)
        self.file = path.open("a")
        self.done = done
        self.said = ""  # what the driver said last
        logging.getLogger("cudatool.sim").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said = record.getMessage()

    def write(self, **fields: Any) -> None:
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--dump-failed-filechecks", action="store_true")  # numba-cuda's own tests ask for it

    @pytest.fixture(scope="class")
    def initialize_from_pytest_config(self, request: pytest.FixtureRequest) -> None:
        request.cls._dump_failed_filechecks = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.said = ""
        self.write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped or report.when == "call":
            outcome = "passed" if hasattr(report, "wasxfail") and not report.failed else report.outcome
            self.write(test=report.nodeid, outcome=outcome, reason=self._reason(report), seconds=report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            self.write(test=report.nodeid, outcome=report.outcome, reason=self._reason(report))

    def _reason(self, report: pytest.TestReport | pytest.CollectReport) -> str:
        if report.passed:
            return ""
        if isinstance(report.longrepr, tuple):  # (file, line, "Skipped: why")
            return report.longrepr[2].removeprefix("Skipped: ")
        text = report.longreprtext
        if log := re.search(r"nvJitLink error log: (.*)", text):
            return log[1]
        if self.said and "CUDA_ERROR" in text:
            return re.sub(r"^(\w+: \w+: )\S+: (?=the software device)", r"\1", self.said)  # without the kernel's name
        errors = re.findall(r"^E +(\S.*)$", text, re.MULTILINE)
        return errors[0] if errors else text.strip().rpartition("\n")[2]


def _run_module(module: str, results: Path) -> int:
    """Run one test module in this process, but for the tests that have ended already; return pytest's status."""
    done = frozenset(_read(results)) if results.exists() else frozenset[str]()
    options = ["-q", "--tb=short", "--no-showlocals", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:randomly"]
    options += [f"--timeout={_TEST_TIMEOUT_S}", "--timeout-method=thread", "-c", os.devnull]
    options += ["--rootdir", str(_suite()), "-o", "consider_namespace_packages=true"]
    return int(pytest.main([*options, "--pyargs", module], [_Outcomes(results, done)]))


# ---- in the process that runs them all -----------------------------------------------------------------------------


def _suite() -> Path:
    import numba.cuda.tests

    return Path(numba.cuda.tests.__file__).parent


def _read(results: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each test."""
    lines = map(json.loads, results.read_text().splitlines())
    tests: dict[str, dict[str, Any]] = {}
    for line in lines:
        known = tests.get(line["test"])
        if known is None or known["outcome"] in ("started", "passed"):  # a failed teardown comes after a passed call
            tests[line["test"]] = line
    return tests


def _run(module: str, folder: Path, environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Run one module in processes of its own, a new one after each that ended in the middle of a test."""
    results = folder / f"{module}.jsonl"
    command = [sys.executable, __file__, "--module", module, "--results", str(results)]
    while True:
        process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, errors="replace")
        tests = _read(results) if results.exists() else {}
        stopped = next((test for test, line in tests.items() if line["outcome"] == "started"), None)
        if stopped is None:
            if not tests and process.returncode not in (0, 5):  # pytest's "no tests collected"
                tests[module] = {"outcome": "failed", "reason": process.stderr.strip().rpartition("\n")[2]}
            return tests
        timed_out = "+ Timeout +" in process.stderr
        reason = f"more than {_TEST_TIMEOUT_S} s" if timed_out else f"the process ended with {process.returncode}"
        with results.open("a") as file:
            file.write(json.dumps({"test": stopped, "outcome": "failed", "reason": reason}) + "\n")


def _modules(wanted: list[str]) -> Iterator[str]:
    suite = _suite()
    for folder in _FOLDERS:
        for path in sorted((suite / folder).rglob("test_*.py")):
            name = str(path.relative_to(suite).with_suffix(""))
            if not wanted or any(part.removesuffix(".py") in name for part in wanted):
                yield "numba.cuda.tests." + name.replace("/", ".")


def _cause(test: str, reason: str) -> str | None:
    """Return which excluded feature a test needs, None if none."""
    return next((cause for cause, pattern in _EXCLUDED if re.search(pattern, f"{test}\n{reason}", re.I)), None)


def _print_counts(title: str, reasons: Iterable[str]) -> None:
    print(f"\n{title}")
    for reason, count in Counter(
        re.sub(r"0x[0-9a-fA-F]+|\b\d{4,}\b|(?<=line )\d+", "N", text)[:170] for text in reasons
    ).most_common():
        print(f"{count:6}  {reason}")


def _report(tests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    by_outcome: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}, "excluded": {}}
    for test, line in tests.items():
        reason = line.get("reason", "")
        cause = _cause(test, reason) if line["outcome"] != "passed" else None
        by_outcome["excluded" if cause else line["outcome"]][test] = cause or reason
    _print_counts("Failed, by cause", by_outcome["failed"].values())
    _print_counts("Failed, by module", (test.partition("::")[0] for test in by_outcome["failed"]))
    _print_counts("Skipped, by cause", by_outcome["skipped"].values())
    _print_counts("Not counted: tests that need what the software device excludes", by_outcome["excluded"].values())
    counts = {outcome: len(found) for outcome, found in by_outcome.items()}
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if ran := counts["passed"] + counts["failed"]:
        print(f"{100 * counts['passed'] / ran:.1f} % of the {ran} that ran")
    return {"schema": "cudatool.peer-tests/1", "suite": "numba-cuda", "counts": counts, "tests": tests}


def main() -> int:
    """Run the suite; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--json", type=Path, help="write every test's outcome here")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: %(default)s)")
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.module:
        return _run_module(options.module, options.results)
    try:
        modules = list(_modules(options.modules))
    except ImportError as error:
        print(f"numba-cuda is not installed: {error}", file=sys.stderr)
        return 2
    if not modules:
        print("no test module has this name", file=sys.stderr)
        return 2
    environment = {"CUDATOOL_DEVICE": _MACHINE, "PYTHONHASHSEED": "0", **os.environ}
    tests: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        # Every process, those that tests start included, must find the software device before it loads libcuda.
        Path(name, "sitecustomize.py").write_text(
            "import contextlib, io\n"
            "with contextlib.redirect_stderr(io.StringIO()):\n"
            "    from cudatool import _driver\n"
            "    _driver.initialize()\n"
        )
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH", "")]))
        for module, found in zip(
            modules, pool.map(lambda module: _run(module, Path(name), environment), modules), strict=True
        ):
            tests.update(found)
            outcomes = Counter(line["outcome"] for line in found.values())
            summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            print(f"{time.strftime('%H:%M:%S')} {module}: {summary}", file=sys.stderr, flush=True)
    result = _report(tests)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
        print(f"Wrote {options.json}", file=sys.stderr)
    return 1 if result["counts"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
