"""Why a request failed, and who should act, where others hold the memory: what the software device cannot show."""

from __future__ import annotations

import pytest
from records import MIB, alloc, of_segment, trace

from cudatool.analyze import Shortage, Topic, failure
from cudatool.trace.events import Kind

_TOTAL = 1000 * MIB
_HELD = (of_segment(Kind.SEGMENT_ALLOC, 0, 100 * MIB), alloc(0, 100 * MIB))
_FAILED = (Kind.OOM, {"size": 50 * MIB, "aux0": 20 * MIB})


def _read(process: int, used: int) -> tuple[Kind, dict[str, int]]:
    return Kind.DEVICE_USE, {"size": process * MIB, "address": used * MIB, "aux0": _TOTAL}


@pytest.mark.parametrize("nvml", [True, False], ids=["NVML", "no NVML"])
def test_what_other_processes_hold_comes_before_what_the_program_holds(nvml: bool) -> None:
    readings = (_read(130, 980),) if nvml else ()
    found = failure(trace(*readings, *_HELD, _FAILED, header={} if nvml else {"total_memory": [_TOTAL]}))
    assert found is not None
    assert (Shortage.FULL, 30 * MIB, _TOTAL) == (found.why, found.missing, found.total)
    others, own = found.remedies
    assert (Topic.OTHERS, 850 * MIB if nvml else 880 * MIB) == (others.topic, others.size)
    assert ("by other processes" in others.text, "contexts" in others.text) == (True, not nvml)
    assert Topic.NEED is own.topic


def test_a_program_that_fills_the_device_is_not_sent_to_others() -> None:
    held = (of_segment(Kind.SEGMENT_ALLOC, 0, 960 * MIB), alloc(0, 960 * MIB))
    found = failure(trace(*held, _FAILED, header={"total_memory": [_TOTAL]}))
    assert found is not None
    assert [Topic.NEED] == [remedy.topic for remedy in found.remedies]


def test_a_first_request_that_fails_finds_a_full_device() -> None:
    found = failure(trace(_FAILED, header={"total_memory": [_TOTAL]}))
    assert found is not None
    assert (Shortage.FULL, 30 * MIB) == (found.why, found.missing)
    assert [Topic.OTHERS] == [remedy.topic for remedy in found.remedies]


def test_a_request_larger_than_the_device_is_not_blamed_on_what_lives() -> None:
    found = failure(
        trace(*_HELD, (Kind.OOM, {"size": _TOTAL + 512, "aux0": 880 * MIB}), header={"total_memory": [_TOTAL]})
    )
    assert found is not None
    assert (Shortage.LARGER, (), None) == (found.why, found.remedies, found.settings)
    exactly = failure(trace(*_HELD, (Kind.OOM, {"size": _TOTAL, "aux0": 880 * MIB}), header={"total_memory": [_TOTAL]}))
    assert exactly is not None and exactly.why is Shortage.FULL
