"""Results as one offline HTML page. No analysis here: see :mod:`cudatool.analyze`."""

from __future__ import annotations

from cudatool.viz.diff_page import diff_page, write_diff
from cudatool.viz.fleet_page import fleet_page, write_fleet
from cudatool.viz.page import page, write_page, write_report

__all__ = ["diff_page", "fleet_page", "page", "write_diff", "write_fleet", "write_page", "write_report"]
