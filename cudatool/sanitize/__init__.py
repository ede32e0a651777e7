"""The happens-before engine, its findings and their reports.

:func:`check` takes a trace and says which accesses no CUDA rule orders. :func:`accepted` and :func:`known` set aside
what comments, rules and a baseline accept. :class:`Outputs` writes the rest in the formats that people and CI systems
read.
"""

from cudatool.sanitize.checker import check
from cudatool.sanitize.family import joined_processes, of_process
from cudatool.sanitize.findings import (
    AccessSite,
    BufferSite,
    DeviceFinding,
    Finding,
    FindingKind,
    Gap,
    GapKind,
    Outcome,
    Report,
)
from cudatool.sanitize.kinds import named_checks, parse_checks
from cudatool.sanitize.report.baseline import Baseline
from cudatool.sanitize.report.outputs import Outputs
from cudatool.sanitize.report.suppress import SuppressionRule, parse_rules
from cudatool.sanitize.report.text import render_json, render_text
from cudatool.sanitize.report.triage import accepted, accepts_races, known
from cudatool.sanitize.report.views import ReportContext
from cudatool.sanitize.witness import with_witnesses

__all__ = [
    "AccessSite",
    "Baseline",
    "BufferSite",
    "DeviceFinding",
    "Finding",
    "FindingKind",
    "Gap",
    "GapKind",
    "Outcome",
    "Outputs",
    "Report",
    "ReportContext",
    "SuppressionRule",
    "accepted",
    "accepts_races",
    "check",
    "joined_processes",
    "known",
    "of_process",
    "named_checks",
    "parse_checks",
    "parse_rules",
    "render_json",
    "render_text",
    "with_witnesses",
]
