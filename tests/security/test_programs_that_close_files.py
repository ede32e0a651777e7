"""A program may close every descriptor and reuse the numbers: its files stay its own, and the report comes all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm_process import COMMAND_LINE, run_python

PROGRAM = """
import os
from cuda.core import Device
device = Device()
device.set_current()
one, other = device.create_stream(), device.create_stream()
os.closerange(3, {last})
files = [open(f"file{{number}}", "wb", buffering=0) for number in range(12)]
buffer = device.memory_resource.allocate(4096, stream=one)
for _ in range(5000):  # more events than one chunk of a recording has
    buffer.fill(b"x", stream=one)
buffer.fill(b"y", stream=other)
device.sync()
for number, file in enumerate(files):
    file.write(b"%d" % number)
"""


@pytest.mark.parametrize("last", [256, 4096], ids=["low-numbers", "all-numbers"])
def test_files_of_the_program_stay_its_own_and_the_report_is_written(tmp_path: Path, last: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(last=last))
    on_device = {"CUDATOOL_DEVICE": "sim"}
    done = run_python(COMMAND_LINE, "sanitize", "program.py", folder=tmp_path, environment=on_device)
    assert (done.returncode, done.stdout.count("race: two writes in no order")) == (1, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert [(tmp_path / f"file{number}").read_bytes() for number in range(12)] == [b"%d" % n for n in range(12)]
