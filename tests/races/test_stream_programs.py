"""Random programs of streams: the sanitizer finds the lines that race, and no others.

``python tests/races/stream_programs.py --programs 5000`` runs more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stream_programs import Step, differ, draw, races
from warm_process import SCRIPT, run_python


@pytest.mark.some_of("seed", range(0, 80, 20), 2)
def test_lines_race_where_nothing_orders_them_and_nowhere_else(seed: int) -> None:
    drawn = ["--programs", "20", "--seed", str(seed)]
    ran = run_python(SCRIPT, str(Path(__file__).with_name("stream_programs.py")), *drawn)
    assert (0, "0 differ") == (ran.returncode, ran.stdout.split(";")[0]), ran.stdout + ran.stderr


def test_programs_have_every_kind_of_step_in_threads_and_of_both_devices() -> None:
    steps = [step for seed in range(80) for step in draw(seed)]
    assert {"allocate", "free", "update", "launch", "wait_for_value", "elapsed"} <= {step.kind for step in steps}
    assert {0, 1, 2} == {step.thread for step in steps}
    assert {"L", "P", "blocking", "other free"} <= {step.args[0] for step in steps}


@pytest.mark.parametrize(
    ("between", "racing"),
    [
        ([], {(1, 4)}),
        ([Step("record", ("free", 0)), Step("wait", ("other free", 0))], set()),
        ([Step("wait", ("other free", 0)), Step("record", ("free", 0))], {(1, 4)}),
        ([Step("wait_for_device", (0,)), Step("fill", ("L", "x1", 0, 1))], set()),
        ([Step("wait_for_device", (1,)), Step("fill", ("L", "x1", 0, 1))], {(1, 4)}),
    ],
    ids=["nothing", "an event", "a wait before the record", "the host", "the host, for the other device"],
)
def test_the_order_is_cudas(between: list[Step], racing: set[tuple[int, int]]) -> None:
    between = between or [Step("fill", ("L", "x1", 0, 1))] * 2
    steps = [Step("fill", ("free", "x0", 0, 64)), *between, Step("copy", ("other free", "y", "x0", 0, 64))]
    assert racing == races(steps, {})
    assert not differ(racing, racing)
    assert differ(racing, racing ^ {(1, 4)})
