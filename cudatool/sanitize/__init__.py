"""The happens-before engine, its findings and their reports.

:func:`check` takes a trace and says which accesses no CUDA rule orders; the renderers turn that into text or JSON.
"""

from cudatool.sanitize.checker import check
from cudatool.sanitize.findings import AccessSite, BufferSite, Finding, FindingKind, Report
from cudatool.sanitize.report import render_json, render_text
from cudatool.sanitize.witness import with_witnesses

__all__ = [
    "AccessSite",
    "BufferSite",
    "Finding",
    "FindingKind",
    "Report",
    "check",
    "render_json",
    "render_text",
    "with_witnesses",
]
