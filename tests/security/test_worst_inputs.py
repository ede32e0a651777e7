"""Files of 1 MB that make as much work as they can: those that once took minutes, or memory without end."""

from __future__ import annotations

from pathlib import Path

import pytest
from worst_inputs import ENDED_AFTER, INPUTS, MOST_INPUT, fault, prepare, run

# The others are for the script: each takes seconds.
SAMPLE = (
    "ptx: kernels",
    "project: keys in keys",
    "rules: an open quote",
    "rules: brackets",
    "rules: other rules",
    "rules: questions",
    "source: a comment",
    "source: attributes",
    "source: comments in a statement",
    "trace: findings in a deep stack",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_work_is_bounded_by_the_size_of_the_input(name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path)
    outcome = run(
        INPUTS[name].commands[-1 if name.startswith(("project", "trace")) else 0], INPUTS[name].file, tmp_path
    )
    assert "" == fault(outcome, most_seconds=ENDED_AFTER)  # no figure of a busy machine decides


def test_inputs_are_no_larger_than_is_said() -> None:
    for name, one in INPUTS.items():
        if not name.startswith("packed"):  # making these takes seconds
            assert len(one.make()) <= MOST_INPUT, name
