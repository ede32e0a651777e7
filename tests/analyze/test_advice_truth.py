"""What the commands recommend, against programs that were run as recommended; see advice_truth.py, which runs more."""

from __future__ import annotations

from functools import cache

import pytest
from advice_truth import Claim, claims
from generated import some_of

# Recordings that begin in mid-program, or with requests that failed: where a gain is easily taken to be too large.
PROGRAMS = (115, 123, 139, 142, 278, 283, 312)
# Of a whole recording and of a cut one, with a gain and without, by each of the commands; and, the last one, of requests
# that waited for other streams when memory had run out.
ALWAYS = (107, 122, 111)


@cache
def found() -> list[Claim]:
    return [claim for seed in (*ALWAYS, *some_of(PROGRAMS, 2, "advice")) for claim in claims(seed)]


def test_some_settings_are_recommended_for_whole_and_for_cut_recordings() -> None:
    assert {False, True} == {bool(claim.lost) for claim in found()}
    assert {"snapshot", "replay", "replay --recorded-memory"} == {claim.command for claim in found()}
    assert {False, True} == {bool(claim.gain) for claim in found()}


def test_no_recommended_setting_costs_memory_or_makes_requests_fail() -> None:
    assert [] == [claim for claim in found() if claim.is_worse]


def test_no_gain_is_said_to_be_larger_than_it_is() -> None:
    assert max(claim.excess for claim in found()) <= 0.01


def test_gain_of_a_whole_recording_is_said_exactly() -> None:
    whole = [claim for claim in found() if claim.gain and not claim.lost]
    assert sum(claim.gain for claim in whole) == pytest.approx(sum(c.before - c.after for c in whole), rel=0.01)
