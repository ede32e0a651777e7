"""Reports for the tests of formats: one finding of each kind, with all that can be awkward in names and paths."""

from __future__ import annotations

from pathlib import Path

from cudatool.sanitize.findings import AccessSite, BufferSite, DeviceFinding, Finding, FindingKind, Report
from cudatool.sanitize.kinds import KINDS
from cudatool.source_text import SourceLine
from cudatool.trace.model import Frame

SOURCE = """\
def produce(stream):
    launch(
        stream,
        make,
    )  # first
def consume(stream):
    launch(stream, use)
buffer = allocate()
"""
ON_DEVICE = {
    FindingKind.OUT_OF_BOUNDS: "memcheck",
    FindingKind.HOST_POINTER: "memcheck",
    FindingKind.PEER_ACCESS: "memcheck",
    FindingKind.MISALIGNED: "memcheck",
    FindingKind.UNINITIALIZED: "initcheck",
    FindingKind.KERNEL_RACE: "racecheck",
    FindingKind.STALE_READ: "racecheck",
    FindingKind.CAS_GUESS: "racecheck",
    FindingKind.BARRIER_DIVERGENCE: "synccheck",
    FindingKind.BAD_MASK: "synccheck",
    FindingKind.ABSENT_LANE: "synccheck",
    FindingKind.INVALID_FREE: "memcheck",
    FindingKind.DOUBLE_FREE: "memcheck",
    FindingKind.INVALID_COPY: "memcheck",
    FindingKind.KERNEL_ERROR: "memcheck",
    FindingKind.LEAK: "leak",
}
LIBRARY = Frame("/usr/lib/python3.12/site-packages/pytest/runner.py", "call", 7)


def pipeline(folder: Path) -> str:
    """Write the file that the findings are in and return its path."""
    path = folder / "my pipeline.py"
    path.write_text(SOURCE)
    return str(path)


def race(file: str, kind: FindingKind = FindingKind.RACE_RAW, *, identity: str = "", exact: bool = True) -> Finding:
    return Finding(
        kind=kind,
        first=AccessSite("kernel make[int, 4]", "stream 1", "write", "out", (Frame(file, "produce", 2), LIBRARY), 3),
        second=AccessSite("kernel use<a|b>", "stream 2", "read", "", (LIBRARY, Frame(file, "consume", 7)), 5, exact),
        start=0x1000,
        size=64,
        buffer=BufferSite(0x1000, 4096, (Frame(file, "<module>", 8),)),
        reason="Nothing makes stream 2 wait for stream 1.",
        repair="Before kernel use, wait: 100 %.",
        count=3,
        fingerprint=identity or f"fp-{kind}",
    )


def on_device(file: str, kind: FindingKind, check: str, **changed: object) -> DeviceFinding:
    facts: dict[str, object] = {
        "kind": kind,
        "check": check,
        "operation": "kernel scale",
        "agent": "stream 1",
        "mode": "write",
        "space": "global",
        "address": 0x2000,
        "size": 4,
        "block": (0, 0, 0),
        "thread": (64, 0, 0),
        "source": SourceLine("scale.cu", 4),
        "other_block": (),
        "other_thread": (),
        "other_source": None,
        "text": "0 bytes after the end of 256 B",
        "stack": (Frame(file, "consume", 7),),
        "record": 9,
        "buffer": BufferSite(0x1F00, 256, (Frame(file, "<module>", 8),)),
        "count": 2,
        "fingerprint": f"fp-{kind}",
    }
    if kind in (FindingKind.KERNEL_RACE, FindingKind.STALE_READ, FindingKind.CAS_GUESS):
        facts |= {"other_block": (0, 0, 0), "other_thread": (1, 0, 0), "other_source": SourceLine("scale.cu", 3)}
    if kind is FindingKind.KERNEL_ERROR:
        facts |= {"mode": "", "space": "", "address": 0, "size": 0, "text": "trap", "buffer": None}
    if kind is FindingKind.LEAK:
        facts |= {"operation": "", "agent": "", "mode": "", "block": (), "thread": (), "source": None}
        facts |= {"text": "256 B in 1 allocation never given back"}
    if kind in (FindingKind.INVALID_FREE, FindingKind.DOUBLE_FREE, FindingKind.INVALID_COPY):
        facts |= {
            "operation": "cuMemFree_v2",
            "agent": "the host",
            "mode": "",
            "block": (),
            "thread": (),
            "source": None,
        }
    return DeviceFinding(**{**facts, **changed})  # type: ignore[arg-type]


def every_kind(file: str) -> Report:
    """A report with one finding of each kind."""
    return Report(
        findings=tuple(race(file, kind) for kind in FindingKind if kind not in ON_DEVICE),
        on_device=tuple(on_device(file, kind, check) for kind, check in ON_DEVICE.items() if KINDS[kind].fails),
        warnings=tuple(on_device(file, kind, check) for kind, check in ON_DEVICE.items() if not KINDS[kind].fails),
        device="the software device",
        operations=12,
        edges={"event wait": 3},
        notes=("1 launch not checked: what they access is not known",),
    )
