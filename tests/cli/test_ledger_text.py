"""What `cudatool snapshot` prints of all the memory that a driver charges to a process."""

from __future__ import annotations

import pytest

from cudatool.trace.events import Event, Kind, UseFlag
from cudatool.trace.recorder import Recorder

MIB = 1 << 20


@pytest.fixture
def printed(run_here, tmp_path):
    """Print a recording of PyTorch's: 20 MiB in a segment and 12 in a block of it, beside a reading of NVML in MiB."""

    def run(process: int, used: int) -> str:
        rows = [
            (Kind.DEVICE_USE, {"size": 10 * MIB * bool(process), "address": 10 * MIB, "flags": UseFlag.CONTEXT}),
            (Kind.SEGMENT_ALLOC, {"address": MIB, "size": 20 * MIB}),
            (Kind.BLOCK_ALLOC, {"address": MIB, "size": 12 * MIB, "aux0": 12 * MIB}),
            (Kind.DEVICE_USE, {"size": process * MIB, "address": used * MIB, "flags": UseFlag.MODULE}),
        ]
        recorder = Recorder(tmp_path / "t.ctrace", header={"libraries": ["PyTorch"]})
        for time, (kind, fields) in enumerate(rows, start=1):
            fields = dict.fromkeys(Event._fields, 0) | {"name": "", "time": time * 10**9, "kind": kind} | fields
            recorder(Event(**fields | {"aux0": fields["aux0"] or 1000 * MIB}))
        recorder.close()  # it is not subscribed: what this process does itself is not of that program
        done = run_here("snapshot", "t.ctrace")
        assert 0 == done.returncode, done.stderr
        return " ".join(done.stdout.split())

    return run


def test_every_holder_has_its_bytes_and_share_and_others_are_named_beside(printed):
    text = printed(40, 90)
    assert "Most memory by NVML of this process, at 3" in text
    assert "12 MiB 30.0 %" in text  # the program's block
    assert "8 MiB 20.0 %" in text  # what PyTorch caches
    assert "in all 40 MiB" in text
    assert "Of 1000 MiB, 90 MiB were in use: 50 MiB by other processes and by the driver for itself" in text


def test_where_nvml_names_no_process_the_use_of_the_device_is_divided(printed):
    text = printed(0, 40)
    assert "Most memory of all processes (NVML does not name them), at 3" in text
    assert "in all 40 MiB" in text
    assert "by other processes" not in text
