from __future__ import annotations

import pytest
from records import BASE, MIB, alloc, free, freed, of_segment, stacks, trace

from cudatool import analyze
from cudatool.trace.events import Kind
from cudatool.trace.frames import call_site
from cudatool.trace.model import Frame, Trace


def program() -> Trace:
    """A 20 MiB segment; 4 MiB and 8 MiB blocks; the first is freed late by a stream; the second stays."""
    return trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 20 * MIB),  # 0
        alloc(0, 4 * MIB, stack=1),  # 1
        alloc(4 * MIB, 8 * MIB, stack=2),  # 2
        free(0),  # 3
        freed(0),  # 4
        (Kind.OOM, {"size": 99}),  # 5
        **stacks([("a.py", "f", 1)], [("b.py", "g", 2)]),
    )


def test_curves_follow_every_event() -> None:
    report = analyze.report(program())
    (curve,) = report.timelines
    assert [0, 1, 2, 3, 4] == curve.index.tolist()
    assert [1000, 1010, 1020, 1030, 1040] == curve.time.tolist()
    assert [0, 4, 12, 8, 8] == [size // MIB for size in curve.allocated.tolist()]
    assert [0, 4, 12, 12, 8] == [size // MIB for size in curve.active.tolist()]
    assert [20] * 5 == [size // MIB for size in curve.reserved.tolist()]
    assert 2 == curve.peak()


def test_the_summary_names_peak_and_end() -> None:
    (device,) = analyze.report(program()).summary.devices
    assert (1020, 12 * MIB, 20 * MIB, 8 * MIB) == (
        device.peak.time,
        device.peak.allocated,
        device.peak.reserved,
        device.peak.largest_free,
    )
    assert 0.4 == device.peak.fragmentation
    assert 0.6 == device.now.fragmentation
    assert (2, 1, 12 * MIB) == (device.allocations, device.ooms, device.peak_active)
    assert ["b.py:2 (g)", "a.py:1 (f)"] == [site.label for site in device.at_peak]
    assert [("b.py:2 (g)", 8 * MIB, 1)] == [(site.label, site.size, site.count) for site in device.still_live]


def test_a_trace_without_memory_has_no_devices() -> None:
    summary = analyze.report(trace((Kind.DEVICE_SYNCHRONIZE, {}))).summary
    assert () == summary.devices


@pytest.mark.parametrize(
    ("index", "blocks"),
    [
        (0, [(0, 20, "inactive")]),
        (2, [(0, 4, "active_allocated"), (4, 8, "active_allocated"), (12, 8, "inactive")]),
        (3, [(0, 4, "active_pending_free"), (4, 8, "active_allocated"), (12, 8, "inactive")]),
        (4, [(0, 4, "inactive"), (4, 8, "active_allocated"), (12, 8, "inactive")]),
    ],
)
def test_segments_are_filled_with_blocks_and_holes(index: int, blocks: list[tuple[int, int, str]]) -> None:
    made = program()
    (segment,) = analyze.segments_at(analyze.blocks(made), analyze.segments(made), index)
    assert blocks == [((b.address - BASE) // MIB, b.size // MIB, b.state) for b in segment.blocks]


def test_neighbouring_mapped_runs_are_one_segment_and_whole_ones_are_not() -> None:
    made = trace(
        of_segment(Kind.SEGMENT_MAP, 0, 100),
        of_segment(Kind.SEGMENT_MAP, 100, 100),
        of_segment(Kind.SEGMENT_ALLOC, 200, 100),
        of_segment(Kind.SEGMENT_ALLOC, 300, 100),
    )
    found = analyze.segments_at(analyze.blocks(made), analyze.segments(made), 3)
    assert [(0, 200), (200, 100), (300, 100)] == [(s.address - BASE, s.size) for s in found]


def test_torch_segments_have_pytorchs_fields() -> None:
    made = program()
    segments = analyze.segments_at(analyze.blocks(made), analyze.segments(made), 3)
    (plain,) = analyze.torch_segments(made, segments)
    assert (20 * MIB, 8 * MIB, 12 * MIB) == (plain["total_size"], plain["allocated_size"], plain["active_size"])
    assert [{"filename": "b.py", "name": "g", "line": 2}] == plain["blocks"][1]["frames"]


@pytest.mark.parametrize(("time", "index"), [(999, -1), (1000, 0), (1015, 1), (9999, 5)])
def test_index_at_is_the_last_record_not_later(time: int, index: int) -> None:
    assert index == analyze.index_at(program(), time)


@pytest.mark.parametrize(
    ("stack", "label"),
    [
        ([], ""),
        ([("/home/u/t.py", "f", 3), ("/home/u/m.py", "g", 9)], "t.py:3 (f)"),
        ([("/x/site-packages/torch/adam.py", "init", 7), ("/home/u/t.py", "f", 3)], "t.py:3 (f) via adam.py:7 (init)"),
        ([("c10/alloc.cpp", "malloc", 7), ("/home/u/t.py", "f", 3)], "t.py:3 (f)"),
        ([("c10/alloc.cpp", "malloc", 7)], "alloc.cpp:7 (malloc)"),
        ([("/x/site-packages/a.py", "f", 7)], "a.py:7 (f)"),
        (
            [
                ("??", "torch::unwind::unwind()", 0),
                ("", "c10::cuda::CUDACachingAllocator::Native::allocate(unsigned long)", 0),
                ("", "at::TensorBase at::detail::_empty_generic<long>(c10::ArrayRef<long>)", 0),
                ("", "void at::native::(anonymous namespace)::addmm_out<float>(at::Tensor&, bool)", 0),
                ("", "torch::autograd::Engine::thread_init(int)", 0),
            ],
            "at::native::addmm_out<float>",
        ),
        ([("??", "torch::unwind::unwind()", 0)], "torch::unwind::unwind"),
    ],
)
def test_the_call_site_is_the_users_own_frame(stack: list[tuple[str, str, int]], label: str) -> None:
    assert label == call_site(tuple(Frame(*frame) for frame in stack))


def test_a_name_that_is_too_long_is_cut() -> None:
    assert f"a.py:3 ({'f' * 77}...)" == call_site((Frame("/home/u/a.py", "f" * 5000, 3),))
    assert f"a.py:3 ({'f' * 80})" == call_site((Frame("/home/u/a.py", "f" * 80, 3),))
