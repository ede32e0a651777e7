"""``cudatool snapshot``: where the memory went."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cudatool import analyze
from cudatool.cli._command import Files, command, option
from cudatool.cli._options import BESIDE, force_option, html_option, is_page, range_options, size_of, source_argument
from cudatool.cli._pages import open_page
from cudatool.cli._part import moment_of, read_family
from cudatool.cli._recording_files import beside, newest
from cudatool.cli._snapshot_text import print_report
from cudatool.cli._text import echo_json, messages, results
from cudatool.collect import nvml
from cudatool.export import torch_pickle
from cudatool.files import check_outputs
from cudatool.progress import step
from cudatool.trace.family import process_name
from cudatool.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from cudatool.analyze import MemoryReport
    from cudatool.collect.nvml import NvmlDevice

__all__ = ["snapshot"]

_MOST_DEVICES = 128  # a record's device is a signed byte


@command(
    examples=[
        ("The newest trace in this directory", "cudatool snapshot"),
        ("A page of PyTorch's snapshot, in a browser", "cudatool snapshot --open snapshot.pickle"),
        ("Half a second of it", "cudatool snapshot --time 1.5s:2s snapshot.pickle"),
    ],
)
@source_argument()
@html_option("SOURCE")
@option(
    "--json",
    "as_json",
    is_flag=True,
    group="Output",
    help='Print JSON ("schema": "cudatool.snapshot/1"); bytes and ns.',
)
@option(
    "--torch",
    type=Files(".pickle", path_type=Path),
    metavar="FILE",
    group="Output",
    help="Write a pickle for PyTorch's viewer.",
)
@option(
    "--memory",
    metavar="SIZE",
    help="Memory of the GPU, such as 80GiB, if the file does not have it: needed to find impossible totals and memory "
    "outside the allocator.",
)
@option(
    "--at",
    metavar="TIME",
    group="Range",
    help="Also show who held the memory at this time after the first event, such as 1.5s, with NVML's figures.",
)
@range_options
@force_option
def snapshot(
    source: Path | None,
    html: str | None,
    opens: bool,
    as_json: bool,
    torch: Path | None,
    memory: str | None,
    at: str | None,
    events: str | None,
    time: str | None,
    force: bool,
) -> None:
    """Show where the memory went: who holds it at the peak, why so much more is reserved, and what to do.

    SOURCE is a trace that `cudatool run` wrote, or a pickle from torch.cuda.memory._dump_snapshot(), also
    compressed with xz or gzip. Default: the newest trace in this directory.
    """

    if source is None and html and not is_page(html):
        source, html = Path(html), BESIDE  # `cudatool snapshot --html SOURCE`: the option took the argument
    source = source or newest()
    page = _page_path(source, html)
    check_outputs(filter(None, (page, torch)), [source], force=force)

    size = size_of(memory, "--memory")
    with step("cudatool snapshot"):  # progress shows two seconds from here
        total = dict.fromkeys(range(_MOST_DEVICES), size)
        program, *children = read_family(source, events, time)
        moment = None if at is None else moment_of(program, at)
        reports = [analyze.report(program, total=total, moment=moment)]
        reports += [analyze.report(trace, total=total) for trace in children]
    report, *others = reports
    pages = [(page, report), *((Path(beside(str(page), other.trace)), other) for other in others)] if page else []
    check_outputs([other for other, _ in pages], [source], force=force)
    gpus = _gpus(report)
    said = messages()
    try:
        if as_json:
            document = {"schema": "cudatool.snapshot/1", **report.as_dict(), "cards": [asdict(gpu) for gpu in gpus]}
            of_processes = [{"process": process_name(other.trace), **other.as_dict()} for other in others]
            echo_json({**document, "processes": of_processes} if others else document)
        else:
            _print_reports(reports, gpus)
    finally:  # the files are written even if the reader of stdout has closed it
        if page is not None:
            from cudatool import viz  # only a page needs it

            for path, shown in pages:
                with step(f"writing {path}"):
                    viz.write_report(shown, path)
                of_process = f"; {process_name(shown.trace)}" if others else ""
                said.print(f"Wrote {path} ({format_bytes(path.stat().st_size)}{of_process})", markup=False)
            if opens:
                open_page(page)
            else:
                said.print("Next: open it in a browser; it needs no network", markup=False)
        if torch is not None:
            state = analyze.segments_at(report.blocks, report.segments, len(report.trace.records) - 1)
            torch_pickle.write(
                torch, report.trace, analyze.torch_segments(report.trace, state), analyze.torch_settings(report.trace)
            )
            said.print(f"Wrote {torch} ({format_bytes(torch.stat().st_size)})", markup=False)
            said.print("Next: drop it on https://pytorch.org/memory_viz", markup=False)
    if page is None and torch is None and not as_json and any(one.summary.events for one in reports):
        _print_next_steps(said, source, report)


def _page_path(source: Path, html: str | None) -> Path | None:
    if html is None:
        return None
    if html != BESIDE:
        return Path(html)
    name = source.name
    for ending in (".xz", ".gz", ".ctrace", ".pickle", ".pkl"):
        name = name.removesuffix(ending)
    return source.with_name(f"{name}.html")


def _gpus(report: MemoryReport) -> Sequence[NvmlDevice]:
    """Return which processes use this machine's GPUs now, unless the trace is not from a GPU."""
    if report.trace.header.get("device_kind") == "sim":
        return ()

    return nvml.devices()


def _print_reports(reports: Sequence[MemoryReport], gpus: Sequence[NvmlDevice]) -> None:
    """Print the program's report, and those of its children below their names."""
    console = results()
    for number, report in enumerate(reports):
        if number:
            console.print()
        if len(reports) > 1:
            console.rule(process_name(report.trace), align="left")
        print_report(console, report, () if number else gpus)


def _print_next_steps(said: Console, source: Path, report: MemoryReport) -> None:
    name = shlex.quote(str(source))
    tried = [diagnosis.settings for diagnosis in report.diagnoses if diagnosis.settings is not None]
    if tried:
        which = "that setting and others" if any(one.best is not None for one in tried) else "allocator settings"
        said.print(f"Next: cudatool replay {name}   (what {which} would save)", markup=False)
    said.print(f"Next: cudatool snapshot {name} --html", markup=False)
