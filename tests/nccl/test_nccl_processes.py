"""cudatool.nccl with one process for each rank."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cudatool
from cudatool import nccl
from cudatool.errors import CudaError, UsageError
from cudatool.trace.events import SHARED_COMMUNICATOR, Kind, unpack_dims
from cudatool.trace.reader import read

sys.path.insert(0, str(Path(__file__).parent))  # their processes import it, too

import nccl_ranks

SIZE = 2


@pytest.fixture(autouse=True)
def enough_devices(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("nccl.bindings", reason="NCCL's bindings are not installed")
        if cudatool.device_count() < SIZE:
            pytest.skip("NCCL needs two GPUs for two processes")


def run(part: Callable[..., None], folder: Path | None = None, *, answers: int = SIZE) -> dict[int, Any]:
    """Run the ranks as processes, and return what each put."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    uid = nccl.unique_id()
    ranks = [context.Process(target=part, args=(rank, SIZE, uid, results, str(folder))) for rank in range(SIZE)]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=100) for _ in range(answers))
    for rank in ranks:
        rank.join(timeout=100)
    assert [0] * SIZE == [rank.exitcode for rank in ranks]
    return found


def test_operations_between_processes_give_every_rank_its_result() -> None:
    summed = [10.0, 12.0, 14.0, 16.0]
    found = run(nccl_ranks.collectives)
    for rank in range(SIZE):
        largest = [1.0, 1.0] if rank == 0 else [float(rank)] * 2
        part = [4.0 * rank, 4.0 * rank + 2]
        assert [summed, [10.0, 12.0], [1.0, 1.0], largest, part, [1.0 - rank]] == found[rank]


def test_each_rank_has_its_trace(tmp_path: Path) -> None:
    run(nccl_ranks.recorded, tmp_path)
    numbers = set()
    for rank in range(SIZE):
        (part,) = read(tmp_path / f"{rank}.ctrace").of_kind(Kind.COLLECTIVE)
        assert (rank, SIZE) == unpack_dims(int(part["aux1"]))[:2]
        numbers.add(int(part["aux0"]))
    # By it, the ranks of a communicator are found in the traces of all processes.
    [number] = numbers
    assert SHARED_COMMUNICATOR <= number < 2 * SHARED_COMMUNICATOR


def test_different_operations_fail_at_the_next_call(device: str) -> None:
    if device != "sim":
        pytest.skip("NCCL does not notice that calls do not fit each other")
    found = run(nccl_ranks.different_operations)
    assert "the ranks call different operations: broadcast(op=0), and rank 1" not in found[0]  # it only sends
    assert "the ranks call different operations: all_reduce(op=0), and rank 0 broadcast(op=0)" in found[1]


def test_rank_that_leaves_is_missed(device: str) -> None:
    if device != "sim":
        pytest.skip("NCCL waits for ever")
    found = run(nccl_ranks.leaves_early, answers=1)
    assert "rank 1 has ended or closed its communicator" in found[0]


def test_a_second_rank_of_one_number_is_refused(device: str) -> None:
    if device == "cuda":
        pytest.skip("what two ranks of one number do with NCCL is NCCL's")
    from cudatool.nccl import _peers

    uid = nccl.unique_id()
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(_peers._address(uid, 1))
        with pytest.raises(UsageError, match="there is a rank 1 of this communicator already"):
            _peers.Peers(SIZE, uid, 1)


def test_ranks_that_cannot_meet_name_the_systems_reason(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("NCCL has its own errors")
    from cudatool.nccl import _peers

    def no_descriptor(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(_peers, "_connect", no_descriptor)
    with pytest.raises(CudaError, match="the ranks could not meet: Too many open files") as caught:
        _peers.Peers(SIZE, nccl.unique_id(), 1)
    assert "CUDA_ERROR_OPERATING_SYSTEM" == caught.value.name
