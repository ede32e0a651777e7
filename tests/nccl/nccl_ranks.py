"""What the ranks of test_nccl_processes.py do; a module of its own, which their processes import."""

from __future__ import annotations

from typing import Any

import numpy as np

import cudatool
from cudatool import nccl

__all__ = ["collectives", "different_operations", "leaves_early", "recorded"]


def _device(rank: int) -> cudatool.device:
    return cudatool.device(rank % cudatool.device_count())


def collectives(rank: int, size: int, uid: bytes, results: Any, _: str) -> None:
    with _device(rank), nccl.init_rank(size, uid, rank) as communicator:
        array = cudatool.asarray(np.arange(4.0) + 10 * rank)
        stream = cudatool.Stream()
        stream.wait_stream(cudatool.current_stream())
        communicator.all_reduce(array, stream=stream)
        cudatool.current_stream().wait_stream(stream)
        gathered = communicator.all_gather(array[rank : rank + 1], cudatool.zeros(size, np.float64))
        root = communicator.broadcast(cudatool.full(2, rank), root=1)
        largest = communicator.reduce(cudatool.full(2, rank), op=nccl.MAX)
        part = communicator.reduce_scatter(cudatool.asarray(np.arange(2.0 * size)), cudatool.zeros(2, np.float64))
        received = cudatool.zeros(1)
        with nccl.group():
            communicator.recv(received, (rank + 1) % size)
            communicator.send(cudatool.full(1, rank), (rank - 1) % size)
        found = [a.get().tolist() for a in (array, gathered, root, largest, part, received)]
        results.put((rank, found))


def different_operations(rank: int, size: int, uid: bytes, results: Any, _: str) -> None:
    communicator = nccl.init_rank(size, uid, rank)
    array = cudatool.zeros(2)
    (communicator.all_reduce if rank else communicator.broadcast)(array)
    cudatool.synchronize()
    try:
        communicator.all_reduce(array)
    except cudatool.CudaError as error:
        results.put((rank, str(error)))
    else:
        results.put((rank, ""))


def leaves_early(rank: int, size: int, uid: bytes, results: Any, _: str) -> None:
    communicator = nccl.init_rank(size, uid, rank)
    if rank:
        communicator.close()
        return
    communicator.all_reduce(cudatool.zeros(2))
    cudatool.synchronize()
    try:
        communicator.all_reduce(cudatool.zeros(2))
    except cudatool.CudaError as error:
        results.put((rank, str(error)))


def recorded(rank: int, size: int, uid: bytes, results: Any, folder: str) -> None:
    with (
        cudatool.record(f"{folder}/{rank}.ctrace"),
        _device(rank),
        nccl.init_rank(size, uid, rank) as communicator,
    ):
        communicator.all_reduce(cudatool.zeros(2))
        cudatool.synchronize()
    results.put((rank, None))
