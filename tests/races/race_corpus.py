"""The labelled programs, and what it takes to run them under the sanitizer and to compare its findings with the labels.

A program says at its head, in TOML, which CUDA rule it is about, where that rule is written, and what its variants
(``python PROGRAM racy``) must be reported as::

    # race corpus
    # rule = "Streams run in no order unless something orders them"
    # source = "CUDA Programming Guide, Asynchronous Execution, CUDA Streams"
    # [expect]
    # racy = [["race-raw", "write", "read"]]
    # fixed = []
    # ---

A finding is its kind and the marks of its two sides: the lines that end in ``# @write`` and ``# @read``. Other keys:

* ``cuda``: why the program is not checked on a GPU.
* ``devices``: how many it needs, 1 by default.
* ``memcheck``: which kinds the checkers of the software device may report as well, in the racy variants.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["PROGRAMS", "Mismatch", "Program", "cases", "compare", "run", "programs"]

PROGRAMS = Path(__file__).parent / "programs"

Expected = tuple[str, str, str]
"""Kind of finding, mark of the first side, mark of the second."""


@dataclass(frozen=True)
class Program:
    """One labelled program."""

    path: Path
    rule: str
    source: str
    expect: dict[str, list[Expected]]
    marks: dict[int, str] = field(repr=False)  # line -> mark
    cuda: str = ""
    devices: int = 1
    memcheck: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    @functools.cached_property
    def code(self) -> CodeType:
        return compile(self.path.read_bytes(), str(self.path), "exec", dont_inherit=True)


_HEAD = re.compile(r"# race corpus\n(.*?)# ---\n", re.DOTALL)
_MARK = re.compile(r"# @([\w-]+)$")


def _read(path: Path) -> Program:
    text = path.read_text()
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"{path.name} has no label")
    label = tomllib.loads(head[1].replace("# ", "").replace("#\n", "\n"))
    lines = enumerate(text.splitlines(), 1)
    marks = {number: found[1] for number, line in lines if (found := _MARK.search(line))}
    expect = {variant: [tuple(finding) for finding in found] for variant, found in label.pop("expect").items()}
    for finding in itertools.chain.from_iterable(expect.values()):
        if missing := set(finding[1:]) - set(marks.values()):
            raise ValueError(f"{path.name}: no line is marked {missing}")
    return Program(path, expect=expect, marks=marks, memcheck=tuple(label.pop("memcheck", ())), **label)


@functools.cache
def programs() -> tuple[Program, ...]:
    """Return all programs, by name."""
    return tuple(_read(path) for path in sorted(PROGRAMS.glob("*.py")) if path.stem != "race_kernels")


def cases() -> list[tuple[Program, str]]:
    """Return all programs with each of their variants."""
    return [(program, variant) for program in programs() for variant in program.expect]


@contextlib.contextmanager
def _as_on_a_gpu(path: str) -> Iterator[None]:
    """Record what the runtime itself tells, and what kernels access as their PTX says it."""
    from cudatool import _driver
    from cudatool.recording import drain
    from cudatool.trace import hooks, stacks
    from cudatool.trace.recorder import Recorder

    _driver.initialize()
    stacks.enable(True)
    hooks.wants_accesses = True
    try:
        with Recorder(path, header={"device": "as on a GPU", "device_kind": "cuda"}):
            yield
            drain()
    finally:
        hooks.wants_accesses = False


def run(program: Program, variant: str, *, as_on_a_gpu: bool = False) -> Any:
    """Run a variant in this process and return the sanitizer's report."""
    import cudatool as ct
    from cudatool.recording import record
    from cudatool.sanitize import check
    from cudatool.trace import reader

    folder = tempfile.mkdtemp(prefix="races-")
    argv, sys.argv = sys.argv, [str(program.path), variant]
    sys.path.insert(0, str(PROGRAMS))
    globals_ = {"__name__": "__main__", "__file__": str(program.path)}
    try:
        path = os.path.join(folder, "run.ctrace")
        recording = _as_on_a_gpu(path) if as_on_a_gpu else record(path, measure_accesses=True, checks=["memcheck"])
        with recording:
            exec(program.code, globals_)
        return check(reader.read(path))
    finally:
        sys.path.remove(str(PROGRAMS))
        sys.argv = argv
        shutil.rmtree(folder, ignore_errors=True)
        globals_.clear()
        gc.collect()
        ct.synchronize()
        ct.empty_cache()
        ct.empty_host_cache()


@dataclass(frozen=True)
class Mismatch:
    """How a report differs from the label: defects that it missed, and false alarms."""

    missed: list[Expected]
    false: list[Expected]
    found: int
    """Number of expected findings that were reported."""


def compare(program: Program, variant: str, report: Any) -> Mismatch:
    """Compare a report with the label. On a GPU also findings count that are only possible."""
    expected = Counter(program.expect[variant])
    reported = Counter(
        (finding.kind.value, _mark(program, finding.first.stack), _mark(program, finding.second.stack))
        for finding in (*report.findings, *report.possible)
    )
    for finding in report.on_device:
        _count_checked(finding.kind.value, _mark(program, finding.stack), program, expected, reported)
    missed, false = expected - reported, reported - expected
    return Mismatch(list(missed.elements()), list(false.elements()), (expected & reported).total())


def _count_checked(
    kind: str, mark: str, program: Program, expected: Counter[Expected], reported: Counter[Expected]
) -> None:
    """Count what a checker of the software device saw, of an access that was then not made.

    Such an access is in no trace, so that the report names the defect once: under a schedule that runs a kernel after
    its memory is gone, as a use after free, and not as what would follow from it. A free of memory that nothing used
    then seems to come before its allocation as well: the same missing order.
    """
    for finding in expected:
        if kind == "use-after-free" and finding[0] in (kind, "reuse", "use-before-alloc") and mark in finding[1:]:
            reported[finding] = max(reported[finding], 1)
            for other in set(reported) - set(expected):
                if other[0] == "use-before-alloc" and other[2] in finding[1:]:
                    del reported[other]
            return
    if not (expected and kind in program.memcheck):
        reported[kind, mark, ""] += 1


def _mark(program: Program, stack: Any) -> str:
    lines = [frame.line for frame in stack if frame.file == str(program.path)]
    return next((program.marks[line] for line in lines if line in program.marks), f"line {lines[0] if lines else '?'}")
