from __future__ import annotations

from typing import Any

from recordings import in_turn
from records import BASE, MIB, RECORDINGS, alloc, free, freed, of_segment, report_of, trace

from cudatool import analyze
from cudatool.analyze import Confidence, Severity
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

GIB = 1 << 30


def findings(made: Trace, **more: Any) -> list[tuple[str, Severity, int, int]]:
    blocks, segments = analyze.blocks(made), analyze.segments(made)
    devices = sorted({*blocks.device.tolist(), *segments.device.tolist()})
    curves = {d: analyze.timeline(made, blocks.of_device(d), segments.of_device(d)) for d in devices}
    found = analyze.lint(made, blocks, segments, curves, **more)
    return [(one.rule, one.severity, one.count, one.index) for one in found]


def segment(size: int = 20 * MIB) -> tuple[Kind, dict[str, Any]]:
    return of_segment(Kind.SEGMENT_ALLOC, 0, size)


def test_a_sound_trace_has_no_findings() -> None:
    once = [alloc(0, 512), free(0), freed(0)]
    made = trace(segment(), *once, *once, of_segment(Kind.SEGMENT_FREE, 0, 20 * MIB), segment(), alloc(0, 1024))
    assert [] == findings(made)


@in_turn(RECORDINGS)
def test_a_sound_recording_has_no_errors(name: str) -> None:
    assert [] == [one for one in report_of(name).findings if one.severity == Severity.ERROR]


def test_more_than_the_card_has_is_impossible() -> None:
    made = trace(segment(2 * GIB), alloc(0, 512))
    assert [] == findings(made, total={0: 2 * GIB})
    assert [("impossible-total", Severity.ERROR, 2, 0)] == findings(made, total={0: 2 * GIB - 1})


def test_more_than_any_card_has_is_impossible_but_less_sure() -> None:
    made = trace(segment(300 * GIB))
    assert [("impossible-total", Severity.ERROR, 1, 0)] == findings(made)
    assert [Confidence.MEDIUM] == [one.confidence for one in analyze.report(made).findings]
    assert [] == findings(trace(segment(280 * GIB)))


def test_a_free_of_what_was_not_allocated_is_found() -> None:
    made = trace(alloc(0, 512), free(0), freed(0), free(0), free(4096), freed(4096))
    rule, severity = "free-without-alloc", Severity.ERROR
    assert [(rule, severity, 2, 3), (rule, severity, 1, 5)] == findings(made)


def test_a_block_over_a_live_one_is_found() -> None:
    assert [("overlapping-blocks", Severity.ERROR, 1, 2)] == findings(trace(segment(), alloc(0, 1024), alloc(512, 512)))
    assert [("overlapping-blocks", Severity.ERROR, 1, 2)] == findings(trace(segment(), alloc(512, 512), alloc(0, 1024)))
    assert [] == findings(trace(segment(), alloc(0, 512), alloc(512, 512)))


def test_an_address_handed_out_twice_is_found() -> None:
    assert [("overlapping-blocks", Severity.ERROR, 1, 2)] == findings(trace(segment(), alloc(0, 512), alloc(0, 512)))


def test_the_same_addresses_of_two_devices_do_not_overlap() -> None:
    made = trace(alloc(0, 512), alloc(0, 512, device=1))
    assert [] == findings(made)


def test_a_segment_over_another_is_found() -> None:
    made = trace(segment(), of_segment(Kind.SEGMENT_ALLOC, 10 * MIB, 20 * MIB))
    assert [("overlapping-segments", Severity.ERROR, 1, 1)] == findings(made)


def test_a_block_outside_of_every_segment_is_found() -> None:
    expected = [("block-outside-segments", Severity.ERROR, 1, 1)]
    assert expected == findings(trace(segment(), alloc(30 * MIB, 512)))
    assert expected == findings(trace(segment(), alloc(19 * MIB, 2 * MIB)))
    assert expected == findings(trace(segment(), (Kind.BLOCK_ALLOC, {"address": BASE - 512, "size": 512})))


def test_a_block_may_lie_in_pages_that_were_mapped_one_after_the_other() -> None:
    mapped = [of_segment(Kind.SEGMENT_MAP, i * 2 * MIB, 2 * MIB) for i in range(2)]
    assert [] == findings(trace(*mapped, alloc(MIB, 2 * MIB)))


def test_without_any_segments_blocks_are_not_outside_of_them() -> None:
    assert [] == findings(trace(alloc(0, 512)))


def test_more_active_than_reserved_means_that_segments_are_missing() -> None:
    made = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, MIB),
        of_segment(Kind.SEGMENT_FREE, 0, MIB),
        of_segment(Kind.SEGMENT_ALLOC, 0, 512),
        alloc(0, 1024),
    )
    assert ("active-above-reserved", Severity.ERROR, 1, 3) in findings(made)


def test_times_that_go_back_are_normal_for_microseconds_only() -> None:
    made = trace(alloc(0, 512), alloc(512, 512), alloc(1024, 512))
    made.records["time"] = [5_000, 4_000, 6_000]
    assert [("time-goes-backwards", Severity.INFO, 1, 1)] == findings(made)
    made.records["time"] = [5_000, 60_000_000_000, 6_000]
    assert [("time-goes-backwards", Severity.WARNING, 1, 2)] == findings(made)
    made.header["time_axis"] = "index"
    assert [] == findings(made)


def test_what_the_reader_could_not_read_is_a_finding() -> None:
    made = trace(alloc(0, 512), notes=["The file ends in the middle of a chunk."])
    (finding,) = analyze.report(made).findings
    assert ("incomplete", "The file ends in the middle of a chunk.", -1) == (
        finding.rule,
        finding.message,
        finding.device,
    )


def state(*sizes: int, total: int) -> dict[str, Any]:
    blocks = [{"size": size, "state": "active_allocated"} for size in sizes]
    return {"device": 0, "total_size": total, "blocks": blocks}


def test_blocks_that_do_not_add_up_to_their_segment_are_found() -> None:
    made = trace(segment(2 * MIB), alloc(0, 2 * MIB))
    assert [] == findings(made, final_state=[state(MIB, MIB, total=2 * MIB)])
    found = findings(made, final_state=[state(MIB, MIB // 2, total=2 * MIB)])
    assert ("segment-sum", Severity.ERROR, 1, -1) in found


def test_a_final_state_that_the_events_do_not_lead_to_is_found() -> None:
    made = trace(segment(2 * MIB), alloc(0, 2 * MIB))
    found = findings(made, final_state=[state(MIB, total=MIB)])
    assert [("state-differs-from-events", Severity.WARNING, 1, -1)] * 2 == found


def test_errors_come_first() -> None:
    made = trace(free(0), alloc(0, 512), notes=["The start is lost."])
    assert [Severity.ERROR, Severity.WARNING] == [severity for _, severity, *_ in findings(made)]
