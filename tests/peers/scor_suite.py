"""How racecheck does on the microbenchmarks of ScoR, as published and with plain data.

    python tests/peers/scor_suite.py DIR [--only TEXT] [--schedules N]

DIR is a checkout of csl-iisc/ScoR; its programs are called race_X or norace_X. Their data is volatile: by PTX's memory
model these accesses are strong, and strong accesses of blocks that can see each other do not race. So each program runs
once as it is and once without ``volatile``. A label holds for every order of blocks and warps, and a run has one: each
program runs under N orders.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkers import Outcome, attempt, device_array, launcher

from cudatool import _driver

_RACE = frozenset(["racecheck"])

# What labels get wrong by PTX's model, whose atomics are relaxed: a thread that read a flag learns of what was written
# before only by a fence after the read.
NO_ACQUIRE = {
    "norace_interblock_fence_raw",
    "norace_interwarp-block_fence-atom_hrd-indirect",
    "norace_interwarp-block_fence_hrf-indirect",
    "norace_interwarp_blkfence_raw",
    "norace_interwarp_fence_raw",
}
# As published: data without volatile; and a lock whose own atomics have too narrow a scope.
WEAK = {"norace_interwarp-block_fence-atom_hrd-indirect", "race_interblock_blkatom", "race_interblock_blklock_waw"}


def races(name: str, *, plain: bool) -> bool:
    """Return whether a program has a data race by PTX's memory model."""
    return (name.startswith("race") or name in NO_ACQUIRE) and (plain or name in WEAK)


def run(device: Any, text: str) -> None:
    """Compile and launch a program's kernel as its host does."""
    source = text[text.index("__device__") : text.index("int main")]
    blocks, threads = (int(re.search(rf"#define {name} +(\d+)", text)[1]) for name in ("NBLOCKS", "TPERBLK"))
    launcher(device, source, "kmain")(blocks, threads, device_array(device, np.zeros(1, np.uint32)))


def outcomes(folder: Path, schedules: int, only: str, *, plain: bool) -> list[Outcome]:
    """Run the programs whose names contain `only`; what any order of blocks and warps shows counts as found."""
    results = []
    for path in sorted((folder / "microbenchmarks" / "src").glob("*.cu")):
        if only not in path.stem:
            continue
        text = path.read_text()
        if plain:
            text = text.replace("volatile ", "")
        one = Outcome(path.stem, _RACE if races(path.stem, plain=plain) else frozenset(), frozenset())
        for seed in range(schedules):
            _driver.choose(f"sim:schedule=random,seed={seed}" if seed else "sim")
            seen = attempt(path.stem, one.expected, partial(run, text=text), ("racecheck",))
            one = replace(one, found=one.found | seen.found, error=one.error or seen.error)
        results.append(one)
    return results


def table(title: str, outcomes: Sequence[Outcome]) -> int:
    """Print what was found, missed and false; return how many of the latter two."""
    found = sum(bool(one.expected & one.found) for one in outcomes)
    wrong = [one for one in outcomes if one.expected != one.found or one.error]
    silent = sum(not one.expected and not one.found for one in outcomes)
    missed = sum(bool(one.expected - one.found) for one in wrong)
    false = sum(bool(one.found - one.expected) for one in wrong)
    print(f"{title}: {len(outcomes)} programs: found {found}, missed {missed}, false {false}, rightly silent {silent}")
    for one in wrong:
        print(f"  {one.name}: expected {sorted(one.expected)}, found {sorted(one.found)} {one.error}")
    return len(wrong)


def main() -> int:
    """Run the command line; return the exit code: 1 if something is missed or false."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of csl-iisc/ScoR")
    parser.add_argument("--only", default="", metavar="TEXT", help="programs whose name contains this")
    parser.add_argument("--schedules", type=int, default=6, metavar="N", help="orders of blocks and warps (default 6)")
    options = parser.parse_args()
    if not (options.folder / "microbenchmarks").is_dir():
        parser.error(f"{options.folder} has no microbenchmarks")
    wrong = 0
    for title, plain in (("plain data", True), ("as published", False)):
        wrong += table(title, outcomes(options.folder, options.schedules, options.only, plain=plain))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
