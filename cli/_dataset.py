"""``cudatool export --to parquet``: any number of inputs become parts of one data set."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cudatool.cli._sources import read_trace
from cudatool.cli._text import counted, messages, say
from cudatool.collect import rmm_log
from cudatool.errors import UsageError
from cudatool.fleet.convert import Conversion, Input, convert
from cudatool.processors import processors
from cudatool.text import first_names
from cudatool.trace import reader
from cudatool.trace.family import files_of_children

__all__ = ["write_dataset"]

_KNOWN = (".ctrace", *(f"{kind}{packed}" for kind in (".pickle", ".pkl") for packed in ("", ".xz", ".gz")))
_MOST_NAMED = 20  # failures


def write_dataset(sources: Sequence[Path], output: Path, *, run: str | None, jobs: int | None, again: bool) -> None:
    """Convert all inputs, say what became of them, and exit with status 2 if some failed."""
    inputs = list({one.path.resolve(): one for source in sources for one in _inputs(source, output)}.values())
    if not inputs:
        raise UsageError(f"no trace, snapshot or log of RMM in {first_names([str(source) for source in sources])}")
    most = jobs or processors()
    outcomes: list[Conversion] = list(convert(inputs, output, read_trace, jobs=most, run=run, again=again))
    failed = [outcome for outcome in outcomes if outcome.part is None]
    written = len(outcomes) - len(failed)
    skipped = len(inputs) - len(outcomes)
    had = f"; {skipped:,} unchanged" if skipped else ""
    events = sum(outcome.events for outcome in outcomes)
    said = messages()
    said.print(f"Wrote {counted(written, 'part')} of {output} ({counted(events, 'event')}{had})", markup=False)
    if written or skipped:
        question = "SELECT run, rank, peak_active FROM ranks ORDER BY peak_active DESC"
        said.print(f'Next: cudatool query {shlex.quote(str(output))} "{question}"', markup=False)
    for outcome in failed[:_MOST_NAMED]:
        say(f"not converted: {outcome.path}: {outcome.error}")
    if len(failed) > _MOST_NAMED:
        say(f"not converted: {len(failed) - _MOST_NAMED:,} more")
    if failed:
        sys.exit(2)


def _inputs(source: Path, output: Path) -> Iterator[Input]:
    """Yield the inputs that a SOURCE names: a directory's, all below it; a trace's, with those of its children."""
    if not source.is_dir():
        yield Input(source, "")
        if source.is_file() and reader.is_trace(source):
            yield from (Input(child, "") for child in files_of_children(source, reader.facts(source)))
        return
    result = output.resolve()
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(one for one in folders if not one.startswith(".") and Path(folder, one).resolve() != result)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(_KNOWN) or (name.endswith(".csv") and rmm_log.is_rmm_log(path)):
                yield Input(path, os.path.relpath(folder, source))
