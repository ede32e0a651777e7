"""``cudatool diff``: the differences between two peaks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cudatool import analyze
from cudatool.cli._command import command, option
from cudatool.cli._diff_text import print_diff
from cudatool.cli._options import force_option, page_option, range_options, source_argument
from cudatool.cli._pages import open_page
from cudatool.cli._part import part_of
from cudatool.cli._sources import read_trace, say_notes
from cudatool.cli._text import echo_json, messages, results
from cudatool.files import check_outputs
from cudatool.progress import step
from cudatool.units import format_bytes

if TYPE_CHECKING:
    pass

__all__ = ["diff"]


@command(
    examples=[
        ("What a change of the program costs", "cudatool diff before.ctrace after.ctrace"),
        ("The same as a page", "cudatool diff before.ctrace after.ctrace --html diff.html"),
    ],
)
@source_argument("before", required=True)
@source_argument("after", required=True)
@page_option("Write a page that compares both; it needs no network.")
@force_option
@option("--json", "as_json", is_flag=True, group="Output", help='Print JSON ("schema": "cudatool.diff/1"); bytes.')
@range_options
def diff(
    before: Path,
    after: Path,
    html: str | None,
    opens: bool,
    force: bool,
    as_json: bool,
    events: str | None,
    time: str | None,
) -> None:
    """Compare what two traces or snapshots hold at their peaks, by call site.

    Each is taken at its peak of active bytes. A call site keeps its place when only line numbers
    or folders change; JSON says how each was matched. A range applies to both.
    """

    check_outputs([html] if html else [], [before, after], force=force)
    with step("cudatool diff"):  # progress shows two seconds from here
        old, new = (part_of(read_trace(path), events, time) for path in (before, after))
        for trace in (old, new):
            say_notes(trace)
        found = analyze.diff(old, new)
    try:
        if as_json:
            document = {"schema": "cudatool.diff/1", "before": old.source, "after": new.source}
            echo_json({**document, "devices": [one.as_dict() for one in found]})
        else:
            console = results()
            print_diff(console, found)
    finally:  # the page is written even if the reader of stdout has closed it
        if html:
            from cudatool import viz  # only a page needs it

            with step(f"writing {html}"):
                viz.write_diff(old, new, found, html)
            said = messages()
            said.print(f"Wrote {html} ({format_bytes(Path(html).stat().st_size)})", markup=False)
            if opens:
                open_page(html)
