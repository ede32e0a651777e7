from __future__ import annotations

import pytest
from recordings import in_turn
from records import BASE, MIB, RECORDINGS, alloc, free, freed, of_segment, report_of, trace

from cudatool import analyze
from cudatool.trace.events import Kind, StreamFlag, pack_pool


def test_streams_have_their_own_peaks_and_their_share_of_the_common_one() -> None:
    made = trace(
        (Kind.STREAM_CREATE, {"stream": 1, "flags": StreamFlag.LEGACY_DEFAULT}),
        (Kind.STREAM_CREATE, {"stream": 2, "address": 0xAB}),
        of_segment(Kind.SEGMENT_ALLOC, 0, 20 * MIB, stream=1),
        of_segment(Kind.SEGMENT_ALLOC, 20 * MIB, 20 * MIB, stream=2),
        alloc(0, 3 * MIB, stream=1),
        free(0),
        freed(0),
        alloc(20 * MIB, 9 * MIB, stream=2),
        alloc(0, 1 * MIB, stream=1),
    )
    blocks, segments = analyze.blocks(made), analyze.segments(made)
    first, second = analyze.usage_by_stream(made, blocks, segments, 8)
    assert ("stream 2", 9 * MIB, 9 * MIB, 20 * MIB, 20 * MIB) == (
        first.label,
        first.at_peak,
        first.peak,
        first.reserved_at_peak,
        first.reserved_peak,
    )
    assert ("default stream", MIB, 3 * MIB) == (second.label, second.at_peak, second.peak)


def test_what_ends_where_the_next_begins_is_not_counted_twice() -> None:
    made = trace(alloc(0, 512), alloc(0, 512), alloc(0, 512))
    (usage,) = analyze.usage_by_pool(made, analyze.blocks(made), analyze.segments(made), 2)
    assert 512 == usage.peak


@pytest.mark.parametrize(
    ("pool", "header", "label"),
    [
        (0, {}, "default pool"),
        (pack_pool((3, 0)), {}, "private pool (3, 0)"),
        (pack_pool((0, 7)), {}, "private pool (0, 7)"),
        (2, {"pools": [[0, 0], [5, 0], [0, 9]]}, "private pool (0, 9)"),
        (0, {"pools": [[0, 0]]}, "default pool"),
    ],
)
def test_pools_are_called_by_their_ids(pool: int, header: dict[str, object], label: str) -> None:
    assert label == analyze.pool_label(trace(header=header), pool)


def test_a_recordings_graph_pools_are_told_apart() -> None:
    report = report_of("graphs__default")
    labels = {usage.label for usage in report.diagnoses[0].by_pool}
    assert {"default pool", *(f"private pool ({number}, 0)" for number in range(1, 5))} == labels


@in_turn(RECORDINGS)
def test_shares_at_the_peak_add_up_to_it(name: str) -> None:
    report = report_of(name)
    for device, diagnosis in zip(report.summary.devices, report.diagnoses, strict=True):
        for usage in (diagnosis.by_stream, diagnosis.by_pool):
            assert device.peak_active == sum(row.at_peak for row in usage)
            assert device.peak.reserved == sum(row.reserved_at_peak for row in usage)


def test_a_failed_allocation_tells_what_was_free_and_with_the_cards_size_what_others_held() -> None:
    made = trace(of_segment(Kind.SEGMENT_ALLOC, 0, 20 * MIB), alloc(0, 512), (Kind.OOM, {"aux0": 70 * MIB}))
    (reading,) = analyze.report(made).diagnoses[0].outside.readings
    assert (2, 70 * MIB, 20 * MIB, None) == (reading.index, reading.free, reading.reserved, reading.outside)
    (reading,) = analyze.report(made, total={0: 100 * MIB}).diagnoses[0].outside.readings
    assert 10 * MIB == reading.outside


@pytest.mark.parametrize("stated", [100 * MIB, [100 * MIB]])
def test_a_header_may_state_the_cards_size(stated: object) -> None:
    made = trace(alloc(0, 512), header={"total_memory": stated})
    assert 100 * MIB == analyze.report(made).diagnoses[0].outside.total


def test_what_a_program_took_from_the_driver_itself_is_known() -> None:
    made = trace(
        (Kind.MEM_ALLOC, {"address": BASE, "size": 4 * MIB}),
        (Kind.MEM_FREE, {"address": BASE}),
        (Kind.MEM_ALLOC, {"address": BASE, "size": 3 * MIB}),
        of_segment(Kind.SEGMENT_ALLOC, 20 * MIB, 20 * MIB),
        alloc(20 * MIB, 5 * MIB),
    )
    beside = analyze.report(made).diagnoses[0].outside
    assert (3 * MIB, 4 * MIB) == (beside.taken_by_program, beside.taken_peak)


def test_a_cards_use_is_split_up_exactly() -> None:
    use = analyze.device_use(1000, {7: 300, 8: 150, 9: 50}, 7, reserved=180)
    assert analyze.DeviceUse(1000, 180, 120, 200, 500) == use


def test_a_process_that_the_driver_does_not_show_has_at_least_what_it_reserved() -> None:
    assert analyze.DeviceUse(1000, 180, 0, 50, 770) == analyze.device_use(1000, {9: 50}, 7, reserved=180)
