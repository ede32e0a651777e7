"""Results as one offline HTML page. No analysis here: see :mod:`cudatool.analyze`."""

from __future__ import annotations

from cudatool.viz.page import page, write_page, write_report

__all__ = ["page", "write_page", "write_report"]
