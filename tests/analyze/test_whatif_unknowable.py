"""What no recording tells: pairs of programs with the same recording whose cost under another setting differs.

So one number has to be wrong for one of the two. The prediction must say so, and have a range that holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from whatif_truth import Op, Program, record, run

from cudatool.analyze import Caveat, what_if

MIB = 1 << 20
PLENTY = 1 << 40


def ops(*steps: tuple[Any, ...]) -> list[Op]:
    """Return operations given as ("malloc", block, MiB[, stream]), ("free", block) or ("empty",)."""
    found = []
    for what, *more in steps:
        block = more[0] if more else 0
        size = more[1] * MIB if len(more) > 1 else 0
        found.append(Op(what, block, size, more[2] if len(more) > 2 else 0))
    return found


def peaks(
    programs: Sequence[Program],
    caveat: Caveat,
    folder: Path,
    *,
    conf: str = "",
    recorded: str = "",
    totals: tuple[int, int] = (PLENTY, PLENTY),
    lost: float = 0,
    memory: int | None = None,
    knows_card: bool = True,
) -> tuple[int, int]:
    """Return the true peaks of two programs under `conf`, which have one recording under `recorded` with a caveat."""
    contents, first = [], []
    for number, (made, total) in enumerate(zip(programs, totals, strict=True)):
        path = folder / f"{number}.pickle"
        snapshot, settings, start = record(path, made, run(made, recorded, total), recorded, lost=lost)
        first.append(start)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    card = totals[0] if knows_card else None
    (outcome,) = what_if(snapshot, 0, [conf], recorded=settings, recorded_memory=card, memory=memory)
    assert caveat in outcome.caveats
    true = [run(made, conf, memory or total) for made, total in zip(programs, totals, strict=True)]
    one, other = (max(done.reserved[start:]) for done, start in zip(true, first, strict=True))
    assert outcome.reserved_least_bytes <= min(one, other)
    assert outcome.reserved_most_bytes is None or max(one, other) <= outcome.reserved_most_bytes
    return one, other


def test_what_was_cached_before_the_recording_began(tmp_path: Path) -> None:
    one, other, end = ("malloc", 1, 100), ("malloc", 2, 160), (("malloc", 3, 2), ("free", 3))
    programs = [
        Program(ops(*begin, *end), survives=False)
        for begin in ((one, ("free", 1), other, ("free", 2)), (one, other, ("free", 1), ("free", 2)))
    ]
    found = peaks(programs, Caveat.BEGINS_LATE, tmp_path, conf="expandable_segments:True", lost=0.73)
    assert (160 * MIB, 260 * MIB) == found


@pytest.mark.parametrize("size", [100, 1000, 10_000])
def test_no_number_of_bytes_bounds_what_a_late_beginning_hides(size: int, tmp_path: Path) -> None:
    # Pages go back from around a block in use; whole segments stay, however large they are.
    begin, end = (("free", 1), ("malloc", 2, 2), ("empty",)), (("malloc", 3, 2), ("free", 3))
    programs = [Program(ops(("malloc", 1, first), *begin, *end), survives=False) for first in (40, size)]
    found = peaks(programs, Caveat.BEGINS_LATE, tmp_path, recorded="expandable_segments:True", lost=0.7)
    assert (40 * MIB, size * MIB) == found


def test_what_the_program_does_when_a_request_fails(tmp_path: Path) -> None:
    steps = ops(("malloc", 1, 40), ("malloc", 2, 220), ("free", 2), ("free", 1), ("malloc", 3, 200))
    programs = [Program(steps, survives=survives) for survives in (False, True)]
    conf = "per_process_memory_fraction:0.25"
    found = peaks(programs, Caveat.RUNS_OUT, tmp_path, conf=conf, totals=(1000 * MIB,) * 2)
    assert (40 * MIB, 240 * MIB) == found


def peaks_with_enough(programs: Sequence[Program], folder: Path) -> tuple[int, int]:
    """Return the true peaks without a limit of two programs that were refused a request when they were recorded."""
    conf, total = "per_process_memory_fraction:0.25", 1000 * MIB
    return peaks(programs, Caveat.OTHER_COURSE, folder, recorded=conf, totals=(total, total))


def test_what_the_program_does_with_memory_that_it_was_refused(tmp_path: Path) -> None:
    begin, end = (("malloc", 1, 100), ("malloc", 2, 200)), (("malloc", 3, 100),)
    programs = [Program(ops(*begin, *frees, *end), survives=True) for frees in ((("free", 2),), ())]
    assert (300 * MIB, 400 * MIB) == peaks_with_enough(programs, tmp_path)


def test_what_comes_after_a_request_that_ended_the_program(tmp_path: Path) -> None:
    begin = (("malloc", 1, 100), ("malloc", 2, 200))
    programs = [Program(ops(*begin, *end), survives=False) for end in ((), (("malloc", 3, 500),))]
    assert (300 * MIB, 800 * MIB) == peaks_with_enough(programs, tmp_path)


def test_how_large_a_request_was_that_failed_after_it_was_rounded(tmp_path: Path) -> None:
    programs = [
        Program(ops(("malloc", 1, 100), ("malloc", 2, size), ("malloc", 3, 2)), survives=True) for size in (230, 250)
    ]
    found = peaks(
        programs,
        Caveat.SIZES_ROUNDED,
        tmp_path,
        conf="per_process_memory_fraction:0.34",
        recorded="roundup_power2_divisions:4,per_process_memory_fraction:0.3",
        totals=(1000 * MIB,) * 2,
    )
    assert (330 * MIB, 120 * MIB) == found


def test_calls_of_empty_cache_that_found_nothing(tmp_path: Path) -> None:
    begin = (("malloc", 1, 100), ("free", 1), ("empty",), ("malloc", 2, 100), ("free", 2))
    begin += (("malloc", 3, 50), ("malloc", 4, 50), ("free", 4))
    programs = [Program(ops(*begin, *calls, ("malloc", 5, 60, 7)), survives=False) for calls in ((), (("empty",),))]
    found = peaks(programs, Caveat.CALLS_UNSEEN, tmp_path, conf="expandable_segments:True")
    assert (160 * MIB, 120 * MIB) == found


def test_whether_the_program_emptied_the_cache_or_the_allocator_made_room(tmp_path: Path) -> None:
    begin, end = (("malloc", 1, 7000), ("free", 1)), (("malloc", 2, 8000),)
    programs = [Program(ops(*begin, *calls, *end), survives=False) for calls in ((), (("empty",),))]
    found = peaks(
        programs,
        Caveat.CALLS_UNCLEAR,
        tmp_path,
        totals=(12_000 * MIB, 80_000 * MIB),
        memory=80_000 * MIB,
    )
    assert (15_000 * MIB, 8_000 * MIB) == found


@pytest.mark.parametrize("conf", ["roundup_power2_divisions:2", "per_process_memory_fraction:0.7"])
def test_how_much_memory_the_card_has(conf: str, tmp_path: Path) -> None:
    made = Program(ops(("malloc", 1, 100), ("free", 1), ("malloc", 2, 160)), survives=False)
    totals = (170 * MIB, 250 * MIB)
    one, other = peaks([made, made], Caveat.LIMIT_UNCLEAR, tmp_path, conf=conf, totals=totals, knows_card=False)
    assert one < other
