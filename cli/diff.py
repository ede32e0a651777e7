"""``cudatool diff``: the differences between two peaks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cudatool import analyze
from cudatool.cli._command import command, option
from cudatool.cli._options import force_option, page_option, range_options, source_argument
from cudatool.cli._pages import open_page
from cudatool.cli._part import part_of
from cudatool.cli._sources import read_trace, say_notes
from cudatool.cli._text import bytes_or_unknown, counted, echo_json, messages, new_table, plain, print_rest, results
from cudatool.files import check_outputs
from cudatool.progress import step
from cudatool.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import Diff

__all__ = ["diff"]

_MOST = 20  # rows of the table


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
            for one in found:
                _print(console, one)
            if not found:
                console.print("no device memory was allocated in either")
    finally:  # the page is written even if the reader of stdout has closed it
        if html:
            from cudatool import viz  # only a page needs it

            with step(f"writing {html}"):
                viz.write_diff(old, new, found, html)
            said = messages()
            said.print(f"Wrote {html} ({format_bytes(Path(html).stat().st_size)})", markup=False)
            if opens:
                open_page(html)


def _print(console: Console, found: Diff) -> None:

    console.print(f"Device {found.device}", style="bold")
    table = new_table("At the peak", numbers=("Before", "After", "Change", "Blocks"))
    table.add_row(
        "Active", format_bytes(found.before), format_bytes(found.after), _signed(found.after - found.before), ""
    )
    before, after = found.reserved_before, found.reserved_after
    change = "" if before is None or after is None else _signed(after - before)
    table.add_row("Reserved, at most", bytes_or_unknown(before), bytes_or_unknown(after), change)
    table.add_section()
    differing = [row for row in found.rows if row.change or row.count_before != row.count_after]
    for row in differing[:_MOST]:
        blocks = f"{row.count_before:,} → {row.count_after:,}"
        table.add_row(
            plain(row.compiled.described(row.label)),
            format_bytes(row.before),
            format_bytes(row.after),
            _signed(row.change),
            blocks,
        )
    console.print(table)
    print_rest(console, len(differing), _MOST, "differing call sites")
    same = len(found.rows) - len(differing)
    if same:
        console.print(f"{counted(same, 'call site')} {'holds' if same == 1 else 'hold'} the same in both")


def _signed(size: int) -> str:

    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)
