"""Which call sites hold the arrays of a library that says it itself, when it had most of them."""

from __future__ import annotations

from records import MIB, stacks, trace

from cudatool import analyze
from cudatool.trace.events import Kind
from cudatool.trace.libraries import Library

FRAMES = stacks(
    [("train.py", "load", 1)], [("train.py", "step", 2)], [("library.py", "make", 9), ("train.py", "step", 2)]
)


def said(moment: int, size: int, stack: int, *, count: int = 1, device: int = 0):
    row = {"correlation": moment, "size": size, "stack": stack, "aux0": count, "name": Library.JAX, "device": device}
    return Kind.POOL_HELD, row


def in_use(size: int, most: int):
    return Kind.POOL_USE, {"size": size, "aux0": most, "name": Library.JAX}


def test_the_moment_with_most_counts_and_equal_stacks_are_one_line():
    made = trace(
        in_use(MIB, MIB),
        said(4, MIB, 1),
        in_use(7 * MIB, 9 * MIB),
        said(5, 2 * MIB, 1, count=3),
        said(5, MIB, 2),
        said(5, 3 * MIB, 1),
        said(6, 6 * MIB, 2),  # as much, later
        said(6, MIB, 3, device=1),
        **FRAMES,
    )
    first, second = analyze.library_blocks(made)
    assert ("JAX", 0, 3, 6 * MIB, 9 * MIB) == (first.library, first.device, first.index, first.size, first.most)
    assert [("train.py:1 (load)", 5 * MIB, 4), ("train.py:2 (step)", MIB, 1)] == [
        (site.label, site.size, site.count) for site in first.sites
    ]
    assert (1, MIB, None) == (second.device, second.size, second.most)


def test_a_recording_in_which_no_library_says_it_has_none():
    assert () == analyze.library_blocks(trace(in_use(MIB, MIB)))
