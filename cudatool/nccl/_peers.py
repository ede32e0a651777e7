"""Messages between ranks that are processes of one machine, for the software device.

Rank r listens on an abstract Unix socket, whose name and key come from the unique id, and connects to the ranks below
it. A thread takes what arrives, so that sending never waits for the other rank's stream.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, Final

from cudatool.errors import CudaError, UsageError

__all__ = ["Peers"]

_PATIENCE_S: Final = 300  # for the other ranks to come
_POLL_S: Final = 0.005


class Peers:
    """The connections of one rank to all others; made when all are there.

    Attributes
    ----------
    processes
        Id of each rank's process.
    """

    def __init__(self, ranks: int, uid: bytes, rank: int) -> None:
        self.processes = [os.getpid()] * ranks
        self._connections: dict[int, Any] = {}
        self._arrived: dict[tuple[int, str], deque[Any]] = {}  # by sender and queue
        self._gone: set[int] = set()
        self._news = threading.Condition()
        hello = rank, ranks, os.getpid()
        with Listener(_address(uid, rank), "AF_UNIX", backlog=ranks, authkey=uid) as listener:
            for lower in range(rank):
                self._meet(_connect(uid, lower), hello)
            for _ in range(rank + 1, ranks):
                self._meet(listener.accept(), hello)
        threading.Thread(target=self._receive, name=f"cudatool.nccl rank {rank}", daemon=True).start()

    def _meet(self, connection: Connection, hello: tuple[int, int, int]) -> None:
        connection.send(hello)
        rank, ranks, process = connection.recv()
        if ranks != hello[1] or rank in self._connections:
            raise UsageError(f"a rank {rank} of {ranks} came to a communicator of {hello[1]}")
        self.processes[rank] = process
        self._connections[rank] = connection

    def send(self, ranks: Sequence[int], queue: str, message: Any) -> None:
        """Send a message to other ranks."""
        for rank in ranks:
            try:
                self._connections[rank].send((queue, message))
            except OSError:
                raise _lost(rank) from None

    def take(self, rank: int, queue: str) -> Any:
        """Wait for the next message of a rank in a queue, and return it.

        Raises
        ------
        CudaError
            The rank has ended, or has closed its communicator.
        """
        with self._news:
            while not self._arrived.get((rank, queue)):
                if rank in self._gone:
                    raise _lost(rank)
                self._news.wait()
            return self._arrived[rank, queue].popleft()

    def close(self) -> None:
        """Let go of the others."""
        with self._news:
            for connection in self._connections.values():
                connection.close()
            self._gone.update(self._connections)
            self._news.notify_all()

    def _receive(self) -> None:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while ranks:
            try:
                ready: list[Any] = wait(list(ranks))
            except (OSError, ValueError):  # closed
                return
            for connection in ready:
                rank = ranks[connection]
                try:
                    queue, message = connection.recv()
                except (EOFError, OSError):
                    del ranks[connection]
                    with self._news:
                        self._gone.add(rank)
                        self._news.notify_all()
                    continue
                with self._news:
                    self._arrived.setdefault((rank, queue), deque()).append(message)
                    self._news.notify_all()


def _address(uid: bytes, rank: int) -> str:
    return f"\0{uid[:40].decode()}.{rank}"


def _connect(uid: bytes, rank: int) -> Connection:
    """Return a connection to a rank, as soon as it listens."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        try:
            return Client(_address(uid, rank), "AF_UNIX", authkey=uid)
        except ConnectionRefusedError:
            time.sleep(_POLL_S)
    raise CudaError(f"rank {rank} did not come within {_PATIENCE_S} s", "CUDA_ERROR_TIMEOUT")


def _lost(rank: int) -> CudaError:
    return CudaError(f"rank {rank} has ended or closed its communicator", "CUDA_ERROR_UNKNOWN")
