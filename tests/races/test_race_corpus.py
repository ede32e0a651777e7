"""Every program of the corpus under the sanitizer: what is racy is reported as its label says, what is fixed is silent.

``python tests/races/run.py --schedules 20`` runs more schedules and prints precision and recall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from race_corpus import Program, programs
from run import Runner, devices

Ask = Callable[..., dict[str, object]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Run a variant of a program in the process of its device, which the first program starts."""
    runners: dict[tuple[str, bool], Runner] = {}

    def ask(device: str, program: Program, variant: str, *, inferred: bool = False) -> dict[str, object]:
        if (device, inferred) not in runners:
            runners[device, inferred] = Runner(device, inferred=inferred)
        return runners[device, inferred].run(program.name, variant)

    yield ask
    for runner in runners.values():
        runner.close()


@pytest.mark.some_of("device", devices(3), 1)
@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_findings_are_the_labels_ones_under_every_schedule(program: Program, device: str, ask: Ask) -> None:
    for variant in program.expect:
        result = ask(device, program, variant)
        assert ("", "") == (result["error"], result["skipped"]), f"{variant} on {device}"
        assert ([], []) == (result["missed"], result["false"]), f"{variant} on {device}"


@pytest.mark.parametrize("program", [one for one in programs() if not one.cuda], ids=lambda program: program.name)
def test_findings_are_the_same_with_what_a_recording_on_a_gpu_has(program: Program, ask: Ask) -> None:
    for variant in program.expect:
        result = ask(devices(1)[0], program, variant, inferred=True)
        assert ("", "", [], []) == tuple(result[key] for key in ("error", "skipped", "missed", "false")), variant


def test_corpus_has_pairs() -> None:
    assert len(programs()) >= 60
    assert sum(not program.cuda for program in programs()) >= 90
    for program in programs():
        assert any(program.expect.values()), program.name
        assert not all(program.expect.values()), program.name
        assert program.rule and program.source, program.name
