"""The most that a file from a stranger may ask for: each limit once, used where the file is read.

Each is far above what real files need, and keeps a file of 1 MB within some seconds and 512 MiB. Where the work depends
on the size of the file, a limit is a sum: so much for any file, and so much for each of its bytes or events.
SECURITY.md lists :data:`TABLE`; a test compares the two.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BASELINE_BYTES",
    "CHECK_EVENT",
    "CHECK_STEPS",
    "COMMENTED_SOURCE",
    "FAILURE_STEPS",
    "FLOW_STEPS",
    "FRAMED_SIZE",
    "GAP_STEPS",
    "INLINED_SIZE",
    "KERNELS",
    "LOG_LINE",
    "MISSING_RANKS",
    "OBJECT_MEMORY",
    "PAGES",
    "PARAMETERS",
    "PERFETTO_BYTES",
    "PERFETTO_EVENT",
    "PERFETTO_STACKS",
    "PICKLE_BYTES",
    "PICKLE_FEW",
    "PICKLE_MEMORY",
    "PICKLE_RATIO",
    "PICKLE_TEXT",
    "PROJECT_BYTES",
    "PROJECT_DOTS",
    "PTX_BYTES",
    "PTX_DECLARED",
    "PTX_DEPTH",
    "PTX_FEW",
    "PTX_RATIO",
    "PTX_VECTOR",
    "QUESTION_MEMORY",
    "QUOTED_SOURCE",
    "RULES",
    "RULES_BYTES",
    "REPORT_FRAMES",
    "RULE_BRACKETS",
    "RULE_LENGTH",
    "SETTINGS_LENGTH",
    "STACK_FRAMES",
    "TABLE",
    "TABLES_BYTES",
    "VALUE_ROUNDS",
    "VALUE_SCOPES",
    "VALUE_STEPS",
    "WRITTEN_RATIO",
    "WRITTEN_SIZE",
]

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30

# ---- traces ----

TABLES_BYTES: Final = 64 * _MIB
"""Bytes of a chunk of names and stacks: a recorder's have 32 KiB, or one long name."""
STACK_FRAMES: Final = 1024
"""Innermost frames of a stack that are read: a recorder keeps 256."""
REPORT_FRAMES: Final = 50_000
"""Frames of all stacks in the report on a trace; the outer ones are left out where there are more."""
CHECK_STEPS: Final = 1 << 24
"""Steps of some 25 ns that the check of a trace for races may take, and"""
CHECK_EVENT: Final = 1 << 12
"""for each of its events. Most take 200."""
PERFETTO_BYTES: Final = 64 * _MIB
"""Bytes that any trace may become as JSON, and all texts of one stack in it;"""
PERFETTO_EVENT: Final = 16 * _KIB
"""and for each of its events."""
PERFETTO_STACKS: Final = 512 * _MIB
"""Bytes of the stacks of all blocks in that JSON, above which the outer frames are left out."""

# ---- PyTorch's pickles ----

PICKLE_BYTES: Final = 4 * _GIB
"""Bytes of a pickle, unpacked: some 40 million recorded events."""
PICKLE_FEW: Final = 128 * _MIB
"""Bytes that any pickle may have unpacked, and memory that it may take; and for each byte of its file"""
PICKLE_RATIO: Final = 256
"""so many bytes unpacked (snapshots that repeat a step have some 30 in xz),"""
PICKLE_MEMORY: Final = 128
"""so many of memory, and"""
OBJECT_MEMORY: Final = 384
"""so many where no columns are made of it."""
PICKLE_TEXT: Final = 64 * _MIB
"""Bytes of one text or number in it."""
PAGES: Final = 1 << 20
"""Pages of expandable segments: 2 TiB of memory."""

# ---- replays ----

FAILURE_STEPS: Final = 400_000
"""Blocks in use when requests fail, in all: each is looked at then. Beyond that, a program counts as out of memory."""
GAP_STEPS: Final = 10_000_000
"""Gaps between segments that are looked at for room for others."""

# ---- RMM's logs ----

LOG_LINE: Final = 4 * _KIB
"""Bytes of a line."""

# ---- data sets of traces ----

QUESTION_MEMORY: Final = 2 * _GIB
"""Bytes that DuckDB may take unless `--memory` says otherwise; the rest goes to temporary files."""
MISSING_RANKS: Final = 4096
"""Ranks without a trace that are named: a trace may say that it is one of billions."""

# ---- PTX and what holds it ----

PTX_BYTES: Final = 256 * _MIB
"""Bytes of a text."""
PTX_FEW: Final = 1 * _MIB
"""Bytes that compressed PTX may have whatever it is compressed to, and"""
PTX_RATIO: Final = 64
"""for each byte that holds it: toolchains reach some 20."""
PTX_DEPTH: Final = 64
"""Braces and brackets within each other."""
PTX_VECTOR: Final = 1024
"""Registers in braces: the largest instructions name some 256."""
PTX_DECLARED: Final = 1 << 17
"""Registers declared in numbers and bytes initialized, beside some for each character."""
PARAMETERS: Final = 4096
"""Parameters of a kernel: a launch passes 32,764 bytes at most."""
KERNELS: Final = 2000
"""Kernels of a file that `cudatool ptx` shows; of more, one can be named."""
FLOW_STEPS: Final = 5_000_000
"""Blocks and registers that are looked at for the control flow of one function. The largest kernels of libraries
need half of it; without a limit a text of some KiB whose blocks all lead to each other takes hours, and all memory."""
VALUE_STEPS: Final = 300_000
"""Instructions that are looked at for the values of one kernel's pointers, and"""
VALUE_ROUNDS: Final = 16
"""for each instruction of a function with a set of arguments, of which there are"""
VALUE_SCOPES: Final = 48
"""of one function."""
INLINED_SIZE: Final = 250_000
"""Instructions and names of a kernel with its calls inlined."""
FRAMED_SIZE: Final = 150_000
"""Instructions of a kernel with calls that need a stack."""
WRITTEN_SIZE: Final = 100_000
"""Instructions of LLVM's that are written for a kernel, and"""
WRITTEN_RATIO: Final = 8
"""for each instruction of its own."""

# ---- what is given to a program, and stands beside it ----

SETTINGS_LENGTH: Final = 4 * _KIB
"""Characters of the allocator's settings: all there are, with a step for each size class, have 600."""

BASELINE_BYTES: Final = 64 * _MIB
"""Bytes of a baseline."""
RULES: Final = 1000
"""Suppressions of one command: each finding is compared with each."""
RULES_BYTES: Final = 256 * _KIB
"""Bytes of them together: patterns are compiled."""
RULE_LENGTH: Final = 4096
"""Characters of one, and"""
RULE_BRACKETS: Final = 32
"""opening brackets in it: for each that nothing closes, all that follows is looked through."""
PROJECT_BYTES: Final = 256 * _KIB
"""Bytes of a pyproject.toml with settings of ours, and"""
PROJECT_DOTS: Final = 500
"""dots in a line of it: the parts of a key are joined once for each of them."""
QUOTED_SOURCE: Final = 1 * _MIB
"""Bytes of a source file that a report quotes."""
COMMENTED_SOURCE: Final = 256 * _KIB
"""Bytes of a source file whose comments accept findings: it is parsed."""


def _size(number: int) -> str:
    unit, name = next(
        (unit, name) for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB"), (1, "B")) if number >= unit
    )
    return f"{number // unit} {name}"


TABLE: Final[tuple[tuple[str, str], ...]] = (
    ("trace: a chunk of names and stacks", _size(TABLES_BYTES)),
    (
        "trace: steps of the check for races (25 ns each, about); a program that runs has no limit",
        f"{CHECK_STEPS:,}, and {CHECK_EVENT:,} for each event",
    ),
    ("trace: frames of a stack, from the innermost one on", f"{STACK_FRAMES:,}"),
    ("trace: frames of all stacks in a report of `sanitize`", f"{REPORT_FRAMES:,}"),
    ("trace: as JSON for Perfetto", f"{_size(PERFETTO_BYTES)}, and {_size(PERFETTO_EVENT)} for each event"),
    ("trace: text of one stack in that JSON", _size(PERFETTO_BYTES)),
    ("trace: stacks of all blocks in that JSON, without their outer frames", _size(PERFETTO_STACKS)),
    (
        "pickle: unpacked",
        f"{_size(PICKLE_FEW)}, and {PICKLE_RATIO} B for each byte of the file; at most {_size(PICKLE_BYTES)}",
    ),
    ("pickle: memory", f"{_size(PICKLE_FEW)}, and {PICKLE_MEMORY} to {OBJECT_MEMORY} B for each byte of the file"),
    ("pickle: a text or number", _size(PICKLE_TEXT)),
    ("pickle: pages of expandable segments", f"{PAGES:,}"),
    ("replay: blocks in use when requests fail, in all; then it counts as out of memory", f"{FAILURE_STEPS:,}"),
    ("replay: gaps between segments that are looked at", f"{GAP_STEPS:,}"),
    ("RMM log: a line", _size(LOG_LINE)),
    ("data set: memory of a question, without temporary files, unless `--memory` is given", _size(QUESTION_MEMORY)),
    ("data set: ranks without a trace that are named", f"{MISSING_RANKS:,}"),
    ("PTX: a text", _size(PTX_BYTES)),
    ("PTX: compressed, in a fatbin", f"{_size(PTX_FEW)}, and {PTX_RATIO} B for each byte that holds it"),
    ("PTX: braces and brackets within each other", f"{PTX_DEPTH}"),
    ("PTX: registers in braces", f"{PTX_VECTOR:,}"),
    ("PTX: registers declared in numbers", f"{PTX_DECLARED:,}, and 1 for each character"),
    ("PTX: bytes initialized", f"{PTX_DECLARED:,}, and 8 for each character"),
    ("PTX: parameters of a kernel", f"{PARAMETERS:,}"),
    ("PTX: kernels that are shown", f"{KERNELS:,}"),
    ("PTX: steps through the control flow of a function", f"{FLOW_STEPS:,}"),
    ("PTX: steps through the values of a kernel", f"{VALUE_STEPS:,}, and {VALUE_ROUNDS} for each instruction"),
    ("PTX: sets of arguments of a function", f"{VALUE_SCOPES}"),
    ("PTX: a kernel with its calls inlined", f"{INLINED_SIZE:,} instructions and names"),
    ("PTX: a kernel with calls on a stack", f"{FRAMED_SIZE:,} instructions"),
    ("PTX: code written for a kernel", f"{WRITTEN_SIZE:,} instructions, and {WRITTEN_RATIO} for each of its own"),
    ("allocator settings", f"{SETTINGS_LENGTH:,} characters"),
    ("baseline", _size(BASELINE_BYTES)),
    ("suppressions", f"{RULES:,}, {_size(RULES_BYTES)} in all"),
    ("suppression", f"{RULE_LENGTH:,} characters, {RULE_BRACKETS} opening brackets"),
    ("pyproject.toml with `[tool.cudatool]`", f"{_size(PROJECT_BYTES)}, {PROJECT_DOTS} dots in a line"),
    ("source file that is quoted", _size(QUOTED_SOURCE)),
    ("source file whose comments are read", _size(COMMENTED_SOURCE)),
)
"""What is limited, and how: the rows of SECURITY.md's table."""
