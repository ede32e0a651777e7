"""``cudatool export``: a trace for other programs."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from cudatool import analyze
from cudatool.cli._command import command, option
from cudatool.cli._options import force_option, range_options, source_argument
from cudatool.cli._part import read_family
from cudatool.cli._sources import beside, newest, say_notes
from cudatool.cli._text import counted, messages
from cudatool.export import perfetto, sqlite, torch_pickle
from cudatool.files import check_outputs
from cudatool.trace.family import process_name
from cudatool.units import format_bytes

__all__ = ["export"]

_FORMATS = {
    # name -> ending of the file, and what to do with it
    "torch": (".pickle", "drop it on https://pytorch.org/memory_viz"),
    "perfetto": (".perfetto.json", "open it in https://ui.perfetto.dev"),
    "sqlite": (".sqlite", "sqlite3 {path} 'SELECT * FROM by_call_site ORDER BY peak_bytes DESC LIMIT 10'"),
}
_ENDINGS = (".xz", ".gz", ".ctrace", ".pickle", ".pkl", ".csv")


@command(
    examples=[
        ("Kernels and copies on a time line", "cudatool export run.ctrace --to perfetto"),
        ("A snapshot as a database", "cudatool export snapshot.pickle --to sqlite -o memory.sqlite"),
    ],
)
@source_argument()
@option(
    "--to",
    "kind",
    required=True,
    type=click.Choice(list(_FORMATS)),
    group="Output",
    help="torch: a pickle for PyTorch's viewer. perfetto: JSON for ui.perfetto.dev and chrome://tracing. "
    "sqlite: a database of events, allocations, segments and stacks.",
)
@option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    group="Output",
    help="Default: next to SOURCE, with the ending .pickle, .perfetto.json or .sqlite.",
)
@force_option
@range_options
def export(
    source: Path | None, kind: str, output: Path | None, force: bool, events: str | None, time: str | None
) -> None:
    """Write a trace for other programs: PyTorch's viewer, Perfetto, or SQLite.

    SOURCE is a trace that `cudatool run` wrote, a pickle from torch.cuda.memory._dump_snapshot(), or the log of an
    rmm.mr.LoggingResourceAdaptor. Default: the newest trace in this directory.
    """

    source = source or newest()
    ending, following = _FORMATS[kind]
    path = output or _beside(source, ending)
    traces = read_family(source, events, time)
    paths = [path, *(Path(beside(str(path), trace)) for trace in traces[1:])]
    check_outputs(paths, [source], force=force)
    said = messages()
    for trace, written in zip(traces, paths, strict=True):
        if kind == "torch":
            state = analyze.segments_at(analyze.blocks(trace), analyze.segments(trace), len(trace.records) - 1)
            torch_pickle.write(written, trace, analyze.torch_segments(trace, state), analyze.torch_settings(trace))
        elif kind == "perfetto":
            frames = perfetto.write(written, trace)
            if frames is not None:
                text = f"stacks have their {counted(frames, 'innermost frame')}: with all, the file would be too large "
                said.print(f"{text}for Perfetto; --events or --time write a part with all", markup=False)
        else:
            sqlite.write(written, trace)
        say_notes(trace)
        of_process = f"; {process_name(trace)}" if len(traces) > 1 else ""
        said.print(f"Wrote {written} ({format_bytes(written.stat().st_size)}{of_process})", markup=False)
    said.print(f"Next: {following.format(path=shlex.quote(str(path)))}", markup=False)


def _beside(source: Path, ending: str) -> Path:
    name = source.name
    for known in _ENDINGS:
        name = name.removesuffix(known)
    return source.with_name(f"{name}{ending}")
