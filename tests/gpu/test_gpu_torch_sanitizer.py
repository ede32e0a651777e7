"""Programs that use PyTorch: ten, five with a race and their clean twins, under PyTorch's sanitizer and ours; and many
correct ones, of which nothing may be said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cudatool.trace import read
from cudatool.trace.events import Kind

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).with_name("torch_programs")
EXPECTED = {  # program -> the finding of its racy version; what PyTorch's sanitizer says of it, and of its clean twin
    "overlapping_views": ("race-raw", False, False),
    "side_stream_write": ("race-raw", True, False),
    "allocator_reuse": ("reuse", False, False),
    "pinned_read_early": ("race-host", False, False),
    "graph_input": ("race-raw", True, True),  # it takes what is captured for executed
}
CORRECT = [
    *(
        ("idioms.py", name)
        for name in (
            "backward_on_two_streams",
            "ring_of_pinned_buffers",
            "results_by_query",
            "loader_with_pinned_memory",
            "mixed_precision",
            "graphed_training",
            "whole_step_as_a_graph",
            "threads_of_their_own",
            "many_kinds_of_operators",
            "compiled",
        )
    ),
    *(
        ("workload.py", name)
        for name in (
            "transformer",
            "transformer_checkpoint",
            "transformer_half",
            "accumulate",
            "convnet",
            "unet",
            "kv_cache",
            "lstm",
            "graph_network",
            "experts",
            "embeddings",
            "inference",
            "prefetch",
            "captured",
        )
    ),
]


class Outcome(NamedTuple):
    """What the two say of one program."""

    kinds: list[str]
    stacks: list[list[str]]
    ours: subprocess.CompletedProcess[str]
    theirs: subprocess.CompletedProcess[str]

    @property
    def found_by_pytorch(self) -> bool:
        return "CSAN detected" in self.theirs.stderr


def sanitize(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cudatool", "sanitize", "--device", "cuda", "--format", "json", *command],
        capture_output=True,
        text=True,
        check=False,
    )


def examine(program: str, version: str) -> Outcome:
    command = [str(PROGRAMS / f"{program}.py"), version]
    ours = sanitize(*command)
    theirs = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    report: dict[str, Any] = json.loads(ours.stdout) if ours.stdout else {"findings": []}
    found = report["findings"]
    stacks = [
        [Path(frame["file"]).name for frame in side["stack"]] for f in found for side in (f["first"], f["second"])
    ]
    return Outcome([finding["kind"] for finding in found], stacks, ours, theirs)


@pytest.fixture(autouse=True, scope="module")
def pytorch() -> None:
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


@pytest.mark.parametrize("program", EXPECTED)
def test_race_is_found_with_both_stacks_and_its_clean_twin_has_no_finding(program: str) -> None:
    kind, *found_by_pytorch = EXPECTED[program]
    with ThreadPoolExecutor() as pool:
        racy, clean = pool.map(examine, (program, program), ("racy", "clean"))
    assert racy.kinds == [kind], racy.ours.stderr[-2000:]
    assert racy.ours.returncode == 1
    assert racy.stacks == [[f"{program}.py"]] * 2
    assert clean.kinds == [], clean.ours.stdout
    assert clean.ours.returncode == 0, clean.ours.stderr[-2000:]
    assert [racy.found_by_pytorch, clean.found_by_pytorch] == found_by_pytorch


def test_both_sides_and_the_life_of_the_memory_have_their_lines() -> None:
    (finding,) = json.loads(sanitize(str(PROGRAMS / "allocator_reuse.py"), "racy").stdout)["findings"]
    source = (PROGRAMS / "allocator_reuse.py").read_text().splitlines()
    lines = [source[side["stack"][0]["line"] - 1].strip() for side in (finding["first"], finding["second"])]
    assert lines[0] == "total = used.sum()"
    assert lines[1].startswith("other = torch.zeros(")
    freed = source.index("del used") + 1
    assert f"was freed at allocator_reuse.py:{freed}" in finding["reason"]
    assert "record_stream" in finding["repair"]


def test_kernels_of_the_compiler_are_seen_with_what_they_may_touch(tmp_path: Path) -> None:
    trace = tmp_path / "compiled.ctrace"
    command = ["run", "--accesses", "--device", "cuda", "-o", str(trace), str(PROGRAMS / "idioms.py"), "compiled"]
    done = subprocess.run([sys.executable, "-m", "cudatool", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = read(trace)
    launches = found.of_kind(Kind.KERNEL_LAUNCH)
    compiled = [row["correlation"] for row in launches if found.names[int(row["name"])].startswith("triton_")]
    assert len(compiled) > 0
    assert set(compiled) <= set(found.of_kind(Kind.ACCESS)["correlation"])


@pytest.mark.parametrize(("file", "name"), CORRECT)
def test_correct_program_has_no_finding(file: str, name: str) -> None:
    done = sanitize(str(PROGRAMS / file), name)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert (report["findings"], report["possible"]) == ([], [])
    assert report["operations"] > 0


COLLECTIVES = """
import os, sys
import torch
import torch.distributed as dist
rank, world, meeting, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)
x, out = torch.ones(1 << 20, device="cuda"), torch.zeros(world << 20, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
if what == "functional":
    from torch.distributed import _functional_collectives as functional
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    x.mul_(2)
    z = y + 1
elif what == "synchronous":
    dist.all_gather_into_tensor(out, x)
    y = out * 2
    x.zero_()
elif what == "coalesced":
    with dist._coalescing_manager(device=torch.device("cuda", rank), async_ops=True) as work:
        dist.all_reduce(x)
        dist.all_reduce(out)
    work.wait()
    y = out.sum() + x.sum()
else:
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    if what == "waits":
        work.wait()
    if what == "input":
        x.zero_()
    else:
        y = out * 2
    work.wait()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("what", "races"),
    [
        ("result", ["race-raw"]),
        ("input", ["race-war"]),
        ("waits", []),
        ("synchronous", []),
        ("coalesced", []),
        ("functional", []),
    ],
)
def test_what_a_collective_uses_before_its_work_is_waited_for_races(
    tmp_path: Path, what: str, races: list[str], world: int
) -> None:
    import torch

    if torch.cuda.device_count() < world:
        pytest.skip(f"{world} GPUs are needed")
    (tmp_path / "program.py").write_text(COLLECTIVES)

    def of_rank(rank: int) -> subprocess.CompletedProcess[str]:
        return sanitize(str(tmp_path / "program.py"), str(rank), str(world), str(tmp_path / "meeting"), what)

    with ThreadPoolExecutor(world) as pool:
        for done in pool.map(of_rank, range(world)):
            report = json.loads(done.stdout)
            assert (bool(races), races) == (done.returncode, [one["kind"] for one in report["findings"]]), done.stderr
            assert not report["possible"]
            assert "launches" not in {gap["kind"] for gap in report["gaps"]}, report["gaps"]


_OUTSIDE_OF_OPERATORS = """
import threading, torch
kept = [torch.empty(1_000_000, device="cuda")]
def work():
    kept.append(torch.empty_like(kept[0]))
thread = threading.Thread(target=work)
thread.start()
thread.join()
kept.append(torch.zeros(1_000_000, device="cuda"))
kept.append(kept[0] + 1)
"""


def test_memory_that_no_operator_takes_has_its_line_too(tmp_path: Path) -> None:
    program, trace = tmp_path / "outside.py", tmp_path / "outside.ctrace"
    program.write_text(_OUTSIDE_OF_OPERATORS)
    command = ["run", "--accesses", "--device", "cuda", "-o", str(trace), str(program)]
    done = subprocess.run([sys.executable, "-m", "cudatool", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = read(trace)
    blocks, segments = found.of_kind(Kind.BLOCK_ALLOC), found.of_kind(Kind.SEGMENT_ALLOC)
    assert [found.stack(int(row["stack"]))[0].line for row in blocks] == [3, 5, 9, 10]
    assert all(found.stack(int(row["stack"])) for row in segments)
    assert [row["thread"] == blocks[0]["thread"] for row in blocks] == [True, False, True, True]
