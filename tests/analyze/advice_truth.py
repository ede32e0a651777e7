"""What ``cudatool snapshot`` and ``cudatool replay`` recommend from a recording, and what following it really does.

The programs and their recordings are those of whatif_truth.py. The commands read the file as a user's would; then the
program is run under the setting that they print.

    python tests/analyze/advice_truth.py [PROGRAMS [FIRST]]
"""

from __future__ import annotations

import json
import random
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click import Command
from click.testing import CliRunner
from whatif_truth import CONFS, MIB, Run, program, run, total_for, write

from cudatool.cli.replay import replay
from cudatool.cli.snapshot import snapshot
from cudatool.trace.events import Kind

__all__ = ["Claim", "claims"]

_ALLOWED = 0.05  # share of what was recorded by which a gain may be too large


@dataclass
class Claim:
    """A setting that a command printed for a recording, and what it does.

    Attributes
    ----------
    gain
        Bytes that it is said to save; 0 if it is said to avoid failed requests.
    hedged
        Whether the gain is printed as "about" so much.
    before, after
        The most that was reserved from where the recording begins to where it ends, as recorded and under `conf`.
    failed_before, failed_after
        Requests that failed in that time.
    """

    seed: int
    command: str
    recorded: str
    conf: str
    lost: float
    gain: int
    hedged: bool
    before: int
    after: int
    failed_before: int
    failed_after: int

    @property
    def is_worse(self) -> bool:
        """Whether following it costs memory or makes more requests fail."""
        if self.failed_after != self.failed_before:
            return self.failed_after > self.failed_before
        return self.after > self.before

    @property
    def excess(self) -> float:
        """By what share of the recorded peak less is saved than is said; without a gain, whether nothing is avoided."""
        if not self.gain:
            return float(self.failed_after >= self.failed_before)
        return (self.gain - (self.before - self.after)) / self.before


def claims(seed: int) -> Iterator[Claim]:
    """Yield what is printed for two recordings of one program, each whole or cut."""
    draw = random.Random(seed)
    made = program(seed)
    total = total_for(seed, run(made, "", 1 << 44))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        for recorded in draw.sample(CONFS, 2):
            lost, stacks = draw.choice((0.0, 0.0, 0.3, 0.7)), draw.random() < 0.5
            done = run(made, recorded, total)
            first = write(path, made, done, recorded, lost=lost, stacks=stacks)
            span = slice(first, max(len(done.reserved), first + 1))
            for command, conf, gain, hedged in _printed(path, total):
                after = run(made, conf, total)
                most = [max(ran.reserved[span], default=ran.peak) for ran in (done, after)]
                failed = [_failed(ran, span) for ran in (done, after)]
                yield Claim(seed, command, recorded, conf, lost, gain, hedged, *most, *failed)


def _failed(done: Run, span: slice) -> int:
    """Return how many requests failed in some operations."""
    return sum(event.kind == Kind.OOM and span.start <= op <= span.stop for event, op in done.events)


def _printed(path: Path, total: int) -> Iterator[tuple[str, str, int, bool]]:
    """Yield each setting that the commands print: the command, the setting, the bytes and whether about so many."""
    for name, options in (("replay", []), ("replay --recorded-memory", ["--recorded-memory", f"{total}B"])):
        for row in _json(replay, [str(path), *options]):
            if row.get("best"):
                yield name, row["conf"], row["gain_bytes"], bool(row["caveats"])
    for device in _json(snapshot, [str(path)])["devices"]:
        for remedy in device["diagnosis"]["remedies"]:
            if remedy["topic"] == "setting" and remedy["conf"]:
                avoids = remedy["text"].startswith("memory would not run out")
                yield "snapshot", remedy["conf"], 0 if avoids else remedy["size"], remedy["text"].startswith("about")


def _json(command: Command, arguments: list[str]) -> Any:
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("programs", type=int, nargs="?", default=20)
    parser.add_argument("first", type=int, nargs="?", default=0)
    options = parser.parse_args()
    found = [claim for seed in range(options.first, options.first + options.programs) for claim in claims(seed)]
    for claim in sorted(found, key=lambda claim: -claim.excess):
        if claim.is_worse or claim.excess > 0.01:
            print(
                f"{'WORSE' if claim.is_worse else '':5} {100 * claim.excess:+7.2f} % seed {claim.seed} {claim.command}:"
                f" {claim.recorded or 'defaults'} -> {claim.conf or 'defaults'}, lost {claim.lost},"
                f" {'about ' if claim.hedged else ''}{claim.gain / MIB:.0f} MiB said,"
                f" {claim.before / MIB:.0f} -> {claim.after / MIB:.0f}, failed {claim.failed_before} -> {claim.failed_after}"
            )
    print(f"{'':16}printed  worse  too much by > 5 %, of them not hedged, by > 1 %  share of true gain said")
    groups = {
        name: [claim for claim in found if claim.command == name]
        for name in ("snapshot", "replay", "replay --recorded-memory")
    }
    for name, some in {
        **groups,
        "whole": [c for c in found if not c.lost],
        "cut": [c for c in found if c.lost],
    }.items():
        much = [claim for claim in some if claim.excess > _ALLOWED]
        saved = sum(claim.before - claim.after for claim in some if claim.gain)
        said = sum(claim.gain for claim in some)
        print(
            f"{name:16}{len(some):7}{sum(claim.is_worse for claim in some):7}{len(much):9}"
            f"{sum(not claim.hedged for claim in much):9}{sum(claim.excess > 0.01 for claim in some):9}"
            f"{said / saved if saved else 0:10.1%}"
        )


if __name__ == "__main__":
    main()
