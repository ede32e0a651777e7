"""The page: a template, styles, scripts and one JSON document in a single file that needs no network."""

from __future__ import annotations

import base64
import html
import importlib.util
import re
import zlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from cudatool import analyze, sanitize
from cudatool.analyze import MemoryReport
from cudatool.errors import CudatoolError
from cudatool.files import write_whole
from cudatool.text import printable
from cudatool.trace.model import Trace
from cudatool.viz.payload import payload

__all__ = ["SCRIPTS", "assembled", "packed", "page", "write_page", "write_report"]

SCRIPTS = (
    "words.js",
    "colours.js",
    "payload.js",
    "state.js",
    "keys.js",
    "canvas.js",
    "device.js",
    "map.js",
    "timeline.js",
    "ranges.js",
    "overview.js",
    "meanings.js",
    "legend.js",
    "selection.js",
    "moment.js",
    "flame.js",
    "diagnosis.js",
    "streams.js",
    "defects.js",
    "plans.js",
    "memory.js",
    "page.js",
)


def page(report: MemoryReport, found: sanitize.Report | None = None) -> str:
    """Return the page for an analyzed trace, with what the sanitizer found in it.

    Everything from the trace, except its name in the title, is compressed and in base64, which cannot contain markup;
    the scripts show it as text only. A content security policy forbids all external resources.
    """
    return assembled(
        "page.html",
        SCRIPTS,
        title=f"{report.summary.source.rsplit('/', 1)[-1]} - cudatool",
        payload=packed(payload(report, found)),
        plotly=packed(_plotly()) if report.summary.devices else "",
    )


def assembled(body: str, scripts: Iterable[str], *, title: str, payload: str, plotly: str = "") -> str:
    """Return the common shell of all pages around a body and script files; `title` is escaped, the others are not."""
    parts = {
        "title": html.escape(printable(title)),
        "style": _asset("page.css"),
        "body": _asset(body),
        "payload": payload,
        "script": "\n".join(_asset(name) for name in scripts),
        "plotly": plotly,
    }
    # In one pass: inserted text is not searched again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("shell.html"))


def write_report(report: MemoryReport, path: str | Path, found: sanitize.Report | None = None) -> None:
    """Write the page for an analyzed trace, with what the sanitizer found in it, whole or not at all.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    write_whole(path, page(report, found))


def write_page(trace: Trace, path: str | Path, found: sanitize.Report | None = None) -> None:
    """Analyze a trace and write its page; see :func:`write_report`."""
    write_report(analyze.report(trace), path, found)


def _asset(name: str) -> str:
    return resources.files("cudatool.viz").joinpath(name).read_text(encoding="utf-8")


def packed(data: bytes) -> str:
    """Return bytes in the form that the page unpacks; see ``inflate`` in payload.js."""
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _plotly() -> bytes:
    """Return plotly.js as the plotly package ships it, without importing the package (which takes a while)."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.submodule_search_locations is None:
        raise CudatoolError("a page needs plotly.js: pip install plotly")
    directory = Path(next(iter(spec.submodule_search_locations)))
    return (directory / "package_data" / "plotly.min.js").read_bytes()
