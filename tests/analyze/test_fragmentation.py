from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from allocator_program import run
from generated import examples
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from recordings import in_turn
from records import BASE, MIB, RECORDINGS, alloc, free, freed, of_segment, recording, report_of, stacks, trace

from cudatool import analyze
from cudatool.analyze import Cause
from cudatool.analyze.diagnosis import with_setting
from cudatool.memory import Settings
from cudatool.trace import handles
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace
from cudatool.units import format_bytes


def split_of(made: Trace, conf: str = "") -> tuple[analyze.Fragmentation, ...]:
    blocks, segments = analyze.blocks(made), analyze.segments(made)
    curve = analyze.timeline(made, blocks, segments)
    return analyze.fragmentation(made, blocks, segments, curve, 0, Settings.parse(conf))


def causes(moment: analyze.Fragmentation) -> dict[Cause, int]:
    return {share.cause: share.size for share in moment.causes if share.size}


def large(address: int, size: int, **more: Any) -> tuple[Kind, dict[str, Any]]:
    return of_segment(Kind.SEGMENT_ALLOC, address, size, **more)


def small(address: int, size: int, **more: Any) -> tuple[Kind, dict[str, Any]]:
    return of_segment(Kind.SEGMENT_ALLOC, address, size, flags=1, **more)


def test_rounding_and_an_unsplit_remainder_are_told_apart() -> None:
    # 3 MiB - 100 were asked for and rounded to 3 MiB; the free block of 3.5 MiB was handed out whole.
    made = trace(large(0, 20 * MIB), alloc(0, 7 * MIB // 2, aux0=3 * MIB - 100))
    (moment,) = split_of(made)
    assert {Cause.ROUNDING: 100, Cause.UNSPLIT: MIB // 2, Cause.NEW_SEGMENT: 33 * MIB // 2} == causes(moment)


def test_the_rest_of_a_segment_that_was_just_made_is_no_hole_and_calls_for_nothing() -> None:
    made = trace(large(0, 20 * MIB), alloc(0, 2 * MIB), small(40 * MIB, 2 * MIB), alloc(40 * MIB, 512))
    (moment,) = split_of(made)
    assert {Cause.HOLE: 18 * MIB, Cause.NEW_SEGMENT: 2 * MIB - 512} == causes(moment)
    assert [18 * MIB] == [hole.size for hole in moment.holes]
    assert () == analyze.report(trace(small(0, 2 * MIB), alloc(0, 512))).diagnoses[0].advice


def test_holes_in_segments_that_are_needed_anyway_call_for_nothing() -> None:
    """Wherever its blocks lie, what is live fills as many segments."""
    made = trace(small(0, 2 * MIB), alloc(0, 512), alloc(512, 512))
    (moment,) = split_of(made)
    assert (2 * MIB - 1024, 0) == (moment.size_of(Cause.HOLE), moment.releasable)
    assert () == analyze.report(made).diagnoses[0].advice


def test_segments_whose_blocks_the_others_could_take_could_be_given_back() -> None:
    places = (0, 4 * MIB, 8 * MIB)
    made = trace(*(event for at in places for event in (small(at, 2 * MIB), alloc(at, 512), alloc(at + 512, 512))))
    (moment,) = split_of(made)
    assert (3, 4 * MIB) == (len(moment.holes), moment.releasable)
    assert Cause.HOLE in {remedy.topic for remedy in analyze.report(made).diagnoses[0].advice}


def test_rounding_follows_the_settings() -> None:
    made = trace(large(0, 20 * MIB), alloc(0, 6 * MIB, aux0=5 * MIB))
    assert MIB == split_of(made)[0].size_of(Cause.UNSPLIT)
    assert MIB == split_of(made, "roundup_power2_divisions:2")[0].size_of(Cause.ROUNDING)


def test_a_freed_block_that_a_stream_may_use_is_pending_with_all_its_bytes() -> None:
    made = trace(large(0, 20 * MIB), alloc(0, 20 * MIB, aux0=1), free(0), large(40 * MIB, 20 * MIB))
    (moment,) = split_of(made)
    assert {Cause.PENDING: 20 * MIB, Cause.WHOLE_SEGMENT: 20 * MIB} == causes(moment)
    assert (20 * MIB, 0) == (moment.active, moment.requested)


def test_free_memory_elsewhere_is_not_a_hole_of_the_request() -> None:
    made = trace(
        large(0, 20 * MIB, aux1=1),  # a graph's
        large(20 * MIB, 22 * MIB, stream=7),
        small(50 * MIB, 2 * MIB),
        large(60 * MIB, 24 * MIB),
        large(90 * MIB, 30 * MIB),
        alloc(90 * MIB, 29 * MIB),
    )
    (moment,) = split_of(made)
    assert {
        Cause.OTHER_POOL: 20 * MIB,
        Cause.OTHER_STREAM: 22 * MIB,
        Cause.OTHER_SIZE: 2 * MIB,
        Cause.WHOLE_SEGMENT: 24 * MIB,
        Cause.NEW_SEGMENT: MIB,
    } == causes(moment)
    assert analyze.Wanted(29 * MIB, 0, 0, -1) == moment.wanted


@pytest.mark.parametrize(("size", "cause"), [(MIB, Cause.WHOLE_SEGMENT), (MIB + 512, Cause.OTHER_SIZE)])
def test_requests_of_up_to_1_mib_are_served_by_small_segments(size: int, cause: Cause) -> None:
    made = trace(small(0, 2 * MIB), alloc(0, MIB), free(0), freed(0), (Kind.OOM, {"size": size}))
    assert {cause: 2 * MIB} == causes(split_of(made)[-1])


def test_the_split_at_the_peak_counts_the_block_that_the_memory_was_for() -> None:
    made = trace(large(0, 20 * MIB), alloc(0, 20 * MIB), large(40 * MIB, 20 * MIB), alloc(40 * MIB, 20 * MIB))
    (moment,) = split_of(made)
    assert ({}, 3, 40 * MIB) == (causes(moment), moment.index, moment.requested)
    assert (1, 0) == (moment.wanted.index, moment.largest_usable)


def test_the_largest_usable_piece_is_that_before_the_new_memory_came() -> None:
    made = trace(
        large(0, 20 * MIB),
        alloc(0, 15 * MIB),
        large(40 * MIB, 20 * MIB),  # for 6 MiB: 5 were free, and 14 are now
        alloc(40 * MIB, 6 * MIB),
    )
    assert 5 * MIB == split_of(made)[0].largest_usable


def test_a_failed_allocation_is_a_moment_of_its_own() -> None:
    made = trace(
        large(0, 20 * MIB),
        alloc(0, 4 * MIB),
        alloc(4 * MIB, 4 * MIB),
        free(0),
        freed(0),
        (Kind.OOM, {"size": 13 * MIB}),
    )
    peak, failure = split_of(made)
    assert ("peak of reserved", 2, "out of memory", 5) == (peak.moment, peak.index, failure.moment, failure.index)
    assert {Cause.HOLE: 16 * MIB} == causes(failure)
    assert 12 * MIB == failure.largest_usable


def test_only_the_last_failed_allocations_are_taken() -> None:
    made = trace(large(0, 20 * MIB), *([(Kind.OOM, {"size": 1})] * 30))
    assert [0, *range(23, 31)] == [moment.index for moment in split_of(made)]


def test_a_trace_without_segments_has_no_split() -> None:
    assert () == split_of(trace(alloc(0, 512)))


def test_a_hole_names_the_blocks_that_pin_its_segment_the_oldest_first() -> None:
    made = trace(
        large(0, 20 * MIB),
        alloc(0, MIB, stack=1),
        alloc(MIB, 9 * MIB, stack=2),
        alloc(10 * MIB, 2 * MIB, stack=2),
        free(MIB),
        freed(MIB),
        (Kind.OOM, {"size": 10 * MIB}),
        **stacks([("a.py", "f", 1)], [("b.py", "g", 2)]),
    )
    first, second = split_of(made)[-1].holes
    assert (BASE + MIB, 9 * MIB, 2) == (first.address, first.size, first.pinned_by)
    assert (BASE, 20 * MIB) == (first.segment_address, first.segment_size)
    assert [("a.py:1 (f)", MIB, 50, 5), ("b.py:2 (g)", 2 * MIB, 30, 3)] == [
        (pin.label, pin.size, pin.lived, pin.events) for pin in first.pins
    ]
    assert (BASE + 12 * MIB, 8 * MIB, first.pins) == (second.address, second.size, second.pins)


def test_without_a_clock_the_age_of_a_block_is_unknown() -> None:
    made = trace(large(0, 20 * MIB), alloc(0, MIB), (Kind.OOM, {"size": 40 * MIB}), header={"time_axis": "index"})
    assert None is split_of(made)[-1].holes[0].pins[0].lived


def test_blocks_of_different_callers_that_pin_holes_have_different_labels() -> None:
    make = ("/home/me/a.py", "make", 1)
    callers = [[make, ("/home/me/a.py", caller, line)] for line, caller in ((5, "one"), (6, "two"))]
    made = trace(
        *(large(0, 20 * MIB), alloc(0, 4 * MIB, stack=1), alloc(8 * MIB, 4 * MIB, stack=2)),
        *(large(40 * MIB, 20 * MIB), alloc(40 * MIB, 18 * MIB)),
        **stacks(*callers),
    )
    (moment,) = split_of(made)
    labels = {pin.label for hole in moment.holes for pin in hole.pins if pin.stack}
    assert {"a.py:1 (make), from a.py:5 (one)", "a.py:1 (make), from a.py:6 (two)"} == labels


def test_a_hole_of_an_expandable_segment_is_pinned_by_its_neighbours_alone() -> None:
    made = trace(
        of_segment(Kind.SEGMENT_MAP, 0, 40 * MIB),
        *(alloc(4 * i * MIB, 4 * MIB, aux0=4 * MIB - i) for i in range(10)),
        free(16 * MIB),
        freed(16 * MIB),
        (Kind.OOM, {"size": 10 * MIB}),
    )
    (hole,) = split_of(made)[-1].holes
    assert [BASE + 12 * MIB, BASE + 20 * MIB] == [pin.address for pin in hole.pins]
    assert (9, 40 * MIB) == (hole.pinned_by, hole.segment_size)


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5]),
        st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 30 * MIB)),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=60,
)


@hypothesis_settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from(["", "roundup_power2_divisions:4", "max_split_size_mb:20", "expandable_segments:True"]), _OPERATIONS
)
def test_the_causes_of_any_program_add_up_to_what_the_allocator_counts(
    conf: str, operations: list[tuple[int, int, int]]
) -> None:
    made, stats = run(conf, operations)
    blocks, segments = analyze.blocks(made), analyze.segments(made)
    curve = analyze.timeline(made, blocks, segments)
    for row in range(len(curve.index)):
        moment = analyze.fragmentation_at(
            made, blocks, segments, 0, int(curve.index[row]), Settings.parse(conf), moment="", wanted=None
        )
        assert (curve.reserved[row], curve.active[row]) == (moment.reserved, moment.active)
        assert moment.reserved - moment.requested == sum(share.size for share in moment.causes)
        assert all(share.size >= 0 for share in moment.causes)
    if len(curve.index):  # the last moment against the allocator's own statistics
        assert stats["reserved_bytes.all.current"] == moment.reserved
        assert stats["active_bytes.all.current"] == moment.active
        held = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
        assert held == moment.size_of(Cause.PENDING)


@in_turn(RECORDINGS)
def test_a_recordings_causes_add_up_and_no_free_piece_would_have_served(name: str) -> None:
    for moment in report_of(name).diagnoses[0].fragmentation:
        assert moment.reserved - moment.requested == sum(share.size for share in moment.causes)
        assert all(share.size >= 0 for share in moment.causes)
        # PyTorch went to the driver because no free piece fitted: so the pieces that are counted as usable are right.
        assert moment.largest_usable < moment.wanted.size


def test_the_split_explains_what_expandable_segments_save() -> None:
    """The same requests need 4092 MiB or 3008: what is gone are segments that were too small, and holes."""
    default, expandable = (
        report_of(name).diagnoses[0].fragmentation[0] for name in ("llm__default", "llm__expandable")
    )
    assert (4092, 3008) == (default.reserved // MIB, expandable.reserved // MIB)
    saved = {cause: default.size_of(cause) - expandable.size_of(cause) for cause in Cause}
    needed = default.requested - expandable.requested
    assert 1084 * MIB == needed + sum(saved.values())
    assert (962 * MIB, 0) == (default.size_of(Cause.WHOLE_SEGMENT), expandable.size_of(Cause.WHOLE_SEGMENT))
    assert 263 == saved[Cause.HOLE] // MIB
    assert {Cause.WHOLE_SEGMENT, Cause.HOLE} == set(sorted(saved, key=lambda cause: -saved[cause])[:2])


@pytest.mark.parametrize(("name", "saved"), [("llm", 4092 - 3008), ("prefetch", 1582 - 782)])
def test_a_setting_is_named_with_what_a_replay_saved(name: str, saved: int) -> None:
    diagnosis = report_of(f"{name}__default").diagnoses[0]
    assert diagnosis.settings is not None
    assert diagnosis.settings.best is not None
    assert ("expandable_segments:True", saved) == (
        diagnosis.settings.best.conf,
        diagnosis.settings.gain_bytes // MIB,
    )
    (named,) = [remedy for remedy in diagnosis.advice if remedy.conf]
    assert ("expandable_segments:True", diagnosis.settings.gain_bytes) == (named.conf, named.size)
    assert named.text.startswith(format_bytes(diagnosis.settings.gain_bytes))


@in_turn(RECORDINGS)
def test_no_setting_is_named_that_was_not_measured(name: str) -> None:
    for diagnosis in report_of(name).diagnoses:
        best = diagnosis.settings.best if diagnosis.settings else None
        assert ([best.conf] if best else []) == [remedy.conf for remedy in diagnosis.advice if remedy.conf]
        assert not any("expandable_segments" in remedy.text for remedy in diagnosis.advice if not remedy.conf)


def test_a_measured_setting_replaces_its_other_value_and_keeps_the_rest() -> None:
    """400 requests of 33 MiB are rounded to 64: without that, nearly half is reserved."""
    size = 64 * MIB
    events = [event for i in range(8) for event in (large(i * size, size), alloc(i * size, size, aux0=33 * MIB))]
    conf = "max_split_size_mb:200,roundup_power2_divisions:[32:1,64:2,>:1],garbage_collection_threshold:0.8"
    made = trace(*events, header={"allocator_conf": "roundup_power2_divisions:1"})
    assert None is analyze.report(made).diagnoses[0].settings
    assert "max_split_size_mb:200,garbage_collection_threshold:0.8,roundup_power2_divisions:1" == with_setting(
        conf, "roundup_power2_divisions:1"
    )


def test_holes_and_a_setting_that_rounds_up_are_measured_without_both() -> None:
    """Each second block of 20 MiB, rounded to 24, is freed: none of these segments fits what comes then."""
    conf = "roundup_power2_divisions:2"
    frees = [(1, number, 0) for number in range(8)]  # of the blocks that are left then
    made, _ = run(conf, [*[(0, 20 * MIB + 512, 0)] * 16, *frees, *[(0, 40 * MIB + 512, 0)] * 4])
    made.header["allocator_conf"] = conf
    (found,) = analyze.report(made).diagnoses
    assert found.settings is not None
    both = "roundup_power2_divisions:1,expandable_segments:True"
    assert {both, "roundup_power2_divisions:1", f"{conf},expandable_segments:True"} <= {
        outcome.conf for outcome in found.settings.tried
    }
    (named,) = [remedy for remedy in found.advice if remedy.conf]
    assert both == named.conf
    (rounding,) = [remedy for remedy in found.advice if remedy.topic == Cause.ROUNDING]
    assert rounding.text.endswith("lost to rounding, which roundup_power2_divisions increases")


@pytest.mark.parametrize("recorded", ["max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64"])
def test_a_limit_of_splits_that_costs_memory_is_advised_against(recorded: str) -> None:
    """A buffer grows by 8 MiB: with this limit, no block above it is cut, and each size keeps its own."""
    grows = [(what, 8 * MIB * size if what == 0 else 0, 0) for size in range(1, 40) for what in (0, *(1,) * (size > 1))]
    made, _ = run(recorded, grows)
    made.header["allocator_conf"] = recorded
    (found,) = analyze.report(made).diagnoses
    (named,) = [remedy for remedy in found.advice if remedy.conf]
    assert "expandable_segments:True" == named.conf
    with_it, _ = run(named.conf, grows)
    before, after = (analyze.report(one).summary.devices[0].peak_reserved for one in (made, with_it))
    assert before - after == named.size > before // 2


def test_settings_are_tried_for_causes_that_are_only_together_worth_it() -> None:
    """Of 200 MiB, 4 % are lost in a hole and 4 % in small segments."""
    made = trace(
        *(event for i in range(4) for event in (small(2 * i * MIB, 2 * MIB), alloc(2 * i * MIB, 1024))),
        large(8 * MIB, 92 * MIB),
        alloc(8 * MIB, 84 * MIB),
        large(100 * MIB, 100 * MIB),
        alloc(100 * MIB, 100 * MIB),
    )
    (moment,) = split_of(made)
    assert {Cause.HOLE: 8 * MIB, Cause.OTHER_SIZE: 8 * MIB - 4096} == causes(moment)
    assert analyze.report(made).diagnoses[0].settings is not None


def ring(*events: tuple[Kind, dict[str, Any]], prior: int) -> Trace:
    return trace(*events, header={"prior_records": {0: prior}})


def test_the_moment_of_most_use_is_explained_and_not_an_idle_one_before() -> None:
    """As much is reserved all the time; at first nothing of it is in use."""
    made = ring(
        large(0, 40 * MIB),
        large(40 * MIB, 20 * MIB),
        *(event for i in range(4) for event in (alloc(10 * i * MIB, 10 * MIB),)),
        alloc(40 * MIB, 18 * MIB),
        free(0),
        freed(0),
        prior=2,
    )
    (moment,) = split_of(made)
    assert ({Cause.HOLE: 2 * MIB}, 58 * MIB, 6) == (causes(moment), moment.active, moment.index)
    assert () == analyze.report(made).diagnoses[0].advice


def test_what_was_given_back_before_the_first_request_is_left_out() -> None:
    made = ring(
        large(0, 400 * MIB),
        large(400 * MIB, 20 * MIB),
        of_segment(Kind.SEGMENT_FREE, 0, 400 * MIB),
        alloc(400 * MIB, 20 * MIB),
        prior=2,
    )
    (moment,) = split_of(made)
    assert (20 * MIB, {}) == (moment.reserved, causes(moment))


def test_gigabytes_are_not_free_for_want_of_a_few_small_blocks() -> None:
    """The last segment was for a small block, while large ones lay free."""
    made = trace(
        large(0, 400 * MIB),
        alloc(0, 400 * MIB),
        free(0),
        freed(0),
        small(400 * MIB, 2 * MIB),
        alloc(400 * MIB, MIB),
    )
    (moment,) = split_of(made)
    assert {Cause.WHOLE_SEGMENT: 400 * MIB, Cause.NEW_SEGMENT: MIB} == causes(moment)


def test_as_much_as_other_sizes_used_is_free_for_their_sake() -> None:
    made = trace(
        large(0, 20 * MIB),
        alloc(0, 20 * MIB),
        free(0),
        freed(0),
        *(event for i in range(10) for event in (small((20 + 2 * i) * MIB, 2 * MIB), alloc((20 + 2 * i) * MIB, MIB))),
        *(alloc((21 + 2 * i) * MIB, MIB) for i in range(10)),
    )
    (moment,) = split_of(made)
    assert {Cause.OTHER_SIZE: 20 * MIB} == causes(moment)


def test_a_limit_below_the_card_is_named_as_the_reason_of_a_failure() -> None:
    first, *_ = report_of("convnet__frac0.03").diagnoses[0].advice
    assert first.topic is analyze.Topic.LIMIT
    assert first.text.startswith("memory ran out with 134.87 GiB free on the GPU")
    assert "set_per_process_memory_fraction" in first.text


def test_columns_of_a_layout_fill_every_segment() -> None:
    made = recording("streams_default")
    blocks, segments = analyze.blocks(made), analyze.segments(made)
    for index in range(0, len(made.records), 97):
        layout = analyze.layout_at(blocks, segments, index)
        size = np.zeros(len(layout.segments), np.int64)
        np.add.at(size, layout.segment, layout.size)
        assert layout.segments.size.tolist() == size.tolist()
        assert (np.diff(layout.address) > 0).all()


def test_what_a_reader_put_in_front_is_no_moment_before_all_of_it_is_there() -> None:
    """A ring that lost its start: segments and blocks from before it stand in front, the segments first."""
    prior = [large(0, 20 * MIB), large(40 * MIB, 20 * MIB), alloc(0, 20 * MIB), alloc(40 * MIB, 15 * MIB)]
    made = trace(*prior, free(0), freed(0), header={"prior_records": {0: len(prior)}})
    (moment,) = split_of(made)
    assert ({Cause.HOLE: 5 * MIB}, 3, None) == (causes(moment), moment.index, moment.wanted)


def test_growth_after_what_was_there_before_is_the_peak() -> None:
    prior = [large(0, 20 * MIB), alloc(0, 20 * MIB)]
    made = trace(*prior, large(40 * MIB, 20 * MIB), alloc(40 * MIB, 15 * MIB), header={"prior_records": {0: 2}})
    (moment,) = split_of(made)
    assert (3, analyze.Wanted(15 * MIB, 0, 0, 1)) == (moment.index, moment.wanted)


def test_a_failure_of_a_program_that_needs_what_it_has_names_who_holds_it() -> None:
    made = trace(
        large(0, 60 * MIB),
        alloc(0, 60 * MIB),
        (Kind.OOM, {"size": 60 * MIB, "aux0": 4 * MIB}),
    )
    advice = analyze.report(made).diagnoses[0].advice
    assert advice[0].text.startswith("memory ran out with 60 MiB of 60 MiB held by ")
    assert advice[0].text.endswith("in 1 block: free what is not needed, or work on less at a time")


def advised(program: list[tuple[int, int, int]]) -> tuple[int, list[analyze.Remedy]]:
    """Return the most that a program reserves, and the remedies that name no setting."""
    made, _ = run("", program)
    (diagnosis,) = analyze.report(made).diagnoses
    (device,) = analyze.report(made).summary.devices
    return device.peak_reserved, [remedy for remedy in diagnosis.advice if not remedy.conf]


def test_streams_that_each_keep_what_they_used_in_turn_are_advised_to_be_one() -> None:
    """And that saves what is said."""
    before, (remedy,) = advised([step for stream in range(16) for step in ((0, 20 * MIB, stream), (1, 0, 0))])
    after, none = advised([step for _ in range(16) for step in ((0, 20 * MIB, 0), (1, 0, 0))])
    assert (Cause.OTHER_STREAM, before - after, []) == (remedy.topic, remedy.size, none)
    assert remedy.text.startswith("up to 300 MiB: cached on other streams; allocate on one stream")


def test_streams_that_other_tests_made_are_none_of_a_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default streams of two devices have one handle, by which a replay would take them for one stream."""
    for stream in (1, 2):
        known = {"device": stream - 1, "stream": stream, "address": 1, "flags": 0, "aux0": 0, "aux1": 0, "size": 0}
        monkeypatch.setitem(handles._streams, stream, known)
    made, _ = run("", [(0, MIB, 0)])
    assert 0 == len(made.of_kind(Kind.STREAM_CREATE))


def test_streams_of_one_small_block_each_are_advised_to_be_one() -> None:
    """Each reserves a whole segment for it, 32 times what its block takes."""
    before, (remedy,) = advised([step for stream in range(16) for step in ((0, 64 << 10, stream), (1, 0, 0))])
    assert (Cause.OTHER_STREAM, 30 * MIB, 32 * MIB) == (remedy.topic, remedy.size, before)


@pytest.mark.parametrize(("size", "told"), [(18 * MIB, ""), (30 * MIB, ", and call empty_cache before 30 MiB are")])
def test_an_order_of_allocations_saves_what_is_said_with_all_that_is_said(size: int, told: str) -> None:
    """What lives long comes first. A segment of 20 MiB that is free then is of no use to a request of 30 MiB."""
    blocks = [(0, 5 * MIB, 0)] * 16
    before, (remedy,) = advised([*blocks, *((1, index, 0) for index in range(1, 9)), (0, size, 0)])
    assert f"allocate what lives long before what lives short{told}" in remedy.text
    assert bool(told) == ("empty_cache" in remedy.text)
    in_order = [*blocks, *[(1, 8, 0)] * 8]
    after, _ = advised([*in_order, *([(5, 0, 0)] if told else []), (0, size, 0)])
    assert remedy.size == before - after
    if told:
        assert before == advised([*in_order, (0, size, 0)])[0]


def test_no_order_of_allocations_is_advised_where_all_was_needed_at_once() -> None:
    """Eight blocks of 64 MiB are in use together; that they are cached later is no reason of the peak."""
    reserved, (remedy,) = advised([*[(0, 64 * MIB, 0)] * 8, *[(1, 0, 0)] * 8, (0, 3 * MIB, 0), (0, MIB, 0)])
    assert 514 * MIB == reserved
    assert "448 MiB: cached since 512 MiB were in use; call empty_cache after that, if others need the memory" == (
        remedy.text
    )


def test_sizes_that_grow_are_advised_to_come_in_another_order() -> None:
    """And that saves what is said."""
    sizes = [20 * MIB, 40 * MIB, 60 * MIB]
    before, (remedy,) = advised([step for size in sizes for step in ((0, size, 0), (1, 0, 0))])
    after, none = advised([step for size in reversed(sizes) for step in ((0, size, 0), (1, 0, 0))])
    assert (Cause.WHOLE_SEGMENT, before - after, []) == (remedy.topic, remedy.size, none)
    assert remedy.text.endswith("allocate the largest sizes first")


def test_what_no_block_ever_filled_is_not_said_to_be_for_want_of_an_order() -> None:
    """Two blocks of 9 MiB in each segment of 20 MiB leave 2 MiB: in any order, and not if they have 10 MiB."""
    before, (remedy,) = advised([(0, 9 * MIB, 0)] * 24)
    assert (240 * MIB, Cause.HOLE, 24 * MIB) == (before, remedy.topic, remedy.size)
    assert remedy.text.startswith(
        "up to 24 MiB: in segments of 2 or 20 MiB that no block filled; sizes that divide these"
    )
    assert (240 * MIB, []) == advised([(0, 10 * MIB, 0)] * 24)


def test_holes_that_blocks_left_are_told_from_those_that_none_filled() -> None:
    """Each segment of 20 MiB has a block of 6 MiB, one of 6 MiB that is gone, and 8 MiB that none had."""
    made = trace(
        *(
            event
            for at in range(0, 80, 20)
            for event in (
                large(at * MIB, 20 * MIB),
                alloc(at * MIB, 6 * MIB),
                alloc((at + 6) * MIB, 6 * MIB),
                free((at + 6) * MIB),
                freed((at + 6) * MIB),
                alloc((at + 12) * MIB, MIB),
            )
        ),
        large(100 * MIB, 30 * MIB),
        alloc(100 * MIB, 30 * MIB),
    )
    (moment,) = split_of(made)
    assert (4 * 13 * MIB, 4 * 7 * MIB) == (moment.size_of(Cause.HOLE), moment.never_used)
    sizes = {remedy.text.partition(";")[0]: remedy.size for remedy in analyze.report(made).diagnoses[0].advice}
    assert {
        "up to 24 MiB: holes between live blocks": 24 * MIB,
        "up to 28 MiB: in segments of 2 or 20 MiB that no block filled": 28 * MIB,
    } == {text: size for text, size in sizes.items() if "replay" not in text}


@pytest.mark.parametrize(("prior", "never_used"), [(0, 17 * MIB), (2, 0)])
def test_of_segments_from_before_the_recording_it_is_not_known_what_was_in_them(prior: int, never_used: int) -> None:
    (moment,) = split_of(ring(large(0, 20 * MIB), alloc(0, 2 * MIB), alloc(10 * MIB, MIB), prior=prior))
    assert (17 * MIB, never_used) == (moment.size_of(Cause.HOLE), moment.never_used)
