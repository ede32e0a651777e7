"""Every program of the corpus under the sanitizer: what is racy is reported as its label says, what is fixed is silent.

``python tests/races/run.py --schedules 20`` runs more schedules and prints precision and recall.
"""

from __future__ import annotations

import re

import pytest
from race_corpus import programs
from run import devices, run_all


@pytest.mark.parametrize("device", devices(3), ids=lambda device: re.search(r"schedule=(\w+)", device)[1])
def test_findings_are_the_labels_ones_under_every_schedule(device: str) -> None:
    results = run_all(device)
    assert {} == _wrong(results)
    assert not [r for r in results if r["skipped"]]


def test_findings_are_the_same_with_what_a_recording_on_a_gpu_has() -> None:
    results = run_all(devices(1)[0], inferred=True)
    assert {} == _wrong(results)
    assert len({r["program"] for r in results if not r["skipped"]}) >= 90


def _wrong(results: list[dict]) -> dict[str, str]:
    return {
        f"{r['program']} {r['variant']}": r["error"] or f"missed {r['missed']}, false {r['false']}"
        for r in results
        if not r["skipped"] and (r["error"] or r["missed"] or r["false"])
    }


def test_corpus_has_pairs() -> None:
    assert len(programs()) >= 60
    for program in programs():
        assert any(program.expect.values()), program.name
        assert not all(program.expect.values()), program.name
        assert program.rule and program.source, program.name
