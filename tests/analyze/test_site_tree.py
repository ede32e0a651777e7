from __future__ import annotations

import numpy as np
from recordings import in_turn
from records import RECORDINGS, alloc, free, freed, report_of, stacks, trace

from cudatool import analyze
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

INNER, OUTER, OTHER = ("m.py", "layer", 7), ("t.py", "step", 3), ("t.py", "load", 9)


def tree_of(made: Trace, index: int = -1) -> analyze.SiteTree:
    return analyze.site_tree(made, analyze.blocks(made), 0, index % len(made.records))


def rows(tree: analyze.SiteTree) -> list[tuple[int, str, int, int, int]]:
    columns = (tree.parent.tolist(), tree.name, tree.self_size.tolist(), tree.total_size.tolist(), tree.count.tolist())
    return list(zip(*columns, strict=True))


def test_stacks_become_a_tree_from_the_outermost_frame_with_the_largest_child_first() -> None:
    made = trace(
        alloc(0, 100, stack=1),
        alloc(1000, 20, stack=2),
        alloc(2000, 400, stack=3),
        alloc(3000, 1, stack=2),
        **stacks([INNER, OUTER], [OUTER], [OTHER]),
    )
    expected = [(-1, "all", 0, 521, 4), (0, "load", 400, 400, 1), (0, "step", 21, 121, 3), (2, "layer", 100, 100, 1)]
    assert expected == rows(tree_of(made))
    assert (("", "t.py", "t.py", "m.py"), [0, 9, 3, 7]) == (tree_of(made).file, tree_of(made).line.tolist())
    assert analyze.Grouping.STACK == tree_of(made).grouping


def test_only_what_is_live_counts_and_waiting_for_a_stream_is_live() -> None:
    made = trace(alloc(0, 100, stack=1), alloc(1000, 20, stack=1), free(0), freed(0), **stacks([INNER]))
    assert 120 == tree_of(made, 2).total_size[0]
    assert 20 == tree_of(made, 3).total_size[0]


def test_a_block_without_a_stack_among_others_is_said_to_have_none() -> None:
    made = trace(alloc(0, 100, stack=1), alloc(1000, 20), **stacks([INNER]))
    assert ["all", "layer", "(no stack: a thread without Python frames)"] == list(tree_of(made).name)


def test_without_stacks_ranges_are_the_branches_and_sizes_the_leaves() -> None:
    made = trace(
        (Kind.RANGE_PUSH, {"name": "outer"}),
        (Kind.RANGE_PUSH, {"name": "inner"}),
        alloc(0, 1024),
        (Kind.RANGE_POP, {}),
        alloc(2048, 512),
        (Kind.RANGE_POP, {}),
        alloc(4096, 2048),
    )
    tree = tree_of(made)
    assert analyze.Grouping.ANNOTATION == tree.grouping
    expected = [(-1, "all"), (0, "2 KiB each"), (0, "inner"), (2, "1 KiB each"), (0, "outer"), (4, "512 B each")]
    assert expected == list(zip(tree.parent.tolist(), tree.name, strict=True))


def test_a_range_of_another_thread_or_device_is_not_open_here() -> None:
    made = trace(
        (Kind.RANGE_PUSH, {"name": "thread", "thread": 1, "device": -1}),
        (Kind.RANGE_PUSH, {"name": "device", "device": 1}),
        (Kind.RANGE_PUSH, {"name": "host", "device": -1}),
        alloc(0, 1024),
    )
    assert ["host"] == [made.names[i] for i in analyze.range_at(made, np.array([3]))]


def test_without_stacks_and_ranges_sizes_are_all_there_is() -> None:
    tree = tree_of(trace(alloc(0, 1024), alloc(2048, 1024)))
    assert (analyze.Grouping.SIZE, ("all", "1 KiB each")) == (tree.grouping, tree.name)


@in_turn(RECORDINGS)
def test_the_tree_of_a_recording_adds_up_to_its_peak(name: str) -> None:
    report = report_of(name)
    for device, diagnosis in zip(report.summary.devices, report.diagnoses, strict=True):
        tree = diagnosis.tree
        children = np.zeros(len(tree), np.int64)
        np.add.at(children, tree.parent[1:], tree.total_size[1:])
        assert device.peak_active == tree.total_size[0] == tree.self_size.sum()
        assert (tree.total_size == tree.self_size + children).all()
        assert (tree.parent[1:] < np.arange(1, len(tree))).all()


def test_sizes_that_round_alike_are_different_sites_and_read_so() -> None:
    made = trace(alloc(0, 9_797_632), alloc(40 << 20, 9_796_608))
    (device,) = analyze.report(made).summary.devices
    expected = [f"(no stack in this file), 9.34 MiB ({size:,} B) each" for size in (9_797_632, 9_796_608)]
    assert expected == [site.label for site in device.at_peak]
    assert {f"9.34 MiB ({size:,} B) each" for size in (9_797_632, 9_796_608)} <= set(tree_of(made).name)
