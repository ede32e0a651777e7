"""``cudatool export``: a trace for other programs."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from cudatool import analyze
from cudatool.cli._command import Files, command, option
from cudatool.cli._dataset import write_dataset
from cudatool.cli._options import force_option, range_options
from cudatool.cli._part import read_family
from cudatool.cli._recording_files import ENDINGS, beside, newest
from cudatool.cli._sources import say_notes
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
_DATASET = "parquet"
_ENDINGS = (".xz", ".gz", ".ctrace", ".pickle", ".pkl", ".csv")


@command(
    examples=[
        ("Kernels and copies on a time line", "cudatool export run.ctrace --to perfetto"),
        ("A snapshot as a database", "cudatool export snapshot.pickle --to sqlite -o memory.sqlite"),
        ("The traces of all ranks as one data set", "cudatool export traces --to parquet -o traces.dataset"),
    ],
)
@click.argument("sources", nargs=-1, type=Files(*ENDINGS, path_type=Path), metavar="[SOURCE]...")
@option(
    "--to",
    "kind",
    required=True,
    type=click.Choice([*_FORMATS, _DATASET]),
    group="Output",
    help="torch: a pickle for PyTorch's viewer. perfetto: JSON for ui.perfetto.dev and chrome://tracing. "
    "sqlite: a database of events, allocations, segments and stacks. parquet: a data set of any number of traces.",
)
@option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    group="Output",
    help="Default: next to SOURCE, with the ending .pickle, .perfetto.json, .sqlite or .dataset (a directory).",
)
@option("--run", metavar="NAME", group="Data set", help="The run that all SOURCEs belong to. Default: from the traces.")
@option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    group="Data set",
    help="Processes that convert. Default: one for each CPU.",
)
@force_option
@range_options
def export(
    sources: tuple[Path, ...],
    kind: str,
    output: Path | None,
    force: bool,
    run: str | None,
    jobs: int | None,
    events: str | None,
    time: str | None,
) -> None:
    """Write a trace for other programs: PyTorch's viewer, Perfetto, SQLite, or Parquet.

    SOURCE is a trace that `cudatool run` wrote, a pickle from torch.cuda.memory._dump_snapshot(), or the log of an
    rmm.mr.LoggingResourceAdaptor. Default: the newest trace in this directory.

    With --to parquet, SOURCE may be a directory, and there may be several: each becomes a part of the data set, for
    `cudatool query`. Inputs that it has already are skipped unless they changed (-f converts them again).

    Exit status: 0 written, 2 it was not, or not from every SOURCE: the data set has the others, and the last lines name
    those that failed.
    """

    if kind == _DATASET:
        if events or time:
            raise click.UsageError("--to parquet takes whole traces: --events and --time do not go with it")
        given = sources or (newest(),)
        write_dataset(given, output or _beside(given[0], ".dataset"), run=run, jobs=jobs, again=force)
        return
    if len(sources) > 1 or run or jobs:
        raise click.UsageError("several SOURCEs, --run and --jobs go with --to parquet only")
    source = sources[0] if sources else newest()
    _write_file(source, kind, output, force, events, time)


def _write_file(
    source: Path, kind: str, output: Path | None, force: bool, events: str | None, time: str | None
) -> None:
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
