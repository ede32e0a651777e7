"""Messages between ranks that are processes of one machine, for the software device.

Rank r listens on an abstract Unix socket and connects to the ranks below it. A thread takes what arrives, so that
sending never waits for the other rank's stream.

Every user of the machine can read the socket's name and connect to it. So the name is a digest of the unique id, both
sides ask the kernel for the other's user, both prove that they know the id, and a message is a few numbers and the
bytes of an array: nothing that arrives is unpickled or evaluated.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Self

import numpy as np

from cudatool.errors import CudaError, UsageError
from cudatool.nccl._calls import DTYPES, PAIRED, Name
from cudatool.runtime.allocator import Layout

__all__ = ["Message", "Peers"]

_PATIENCE_S: Final = 300  # for the other ranks to come
_HANDSHAKE_S: Final = 30  # for one that is connected to prove that it is a rank
_POLL_S: Final = 0.005
_NONCE: Final = 32  # bytes

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group
_HELLO: Final = struct.Struct("<3I")  # rank, number of ranks, process
_HEADER: Final = struct.Struct("<4B")  # operation, reduction, ncclDataType_t, number of dimensions
_NAMES: Final = tuple(Name)
_DTYPES: Final = {code: dtype for dtype, code in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one rank sends another for an operation."""

    name: Name
    op: int
    values: Layout

    def encode(self) -> bytes:
        """Return it as bytes."""
        shape = self.values.shape
        header = _HEADER.pack(_NAMES.index(self.name), self.op, DTYPES[self.values.dtype], len(shape))
        return b"".join((header, struct.pack(f"<{len(shape)}Q", *shape), self.values.tobytes()))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return what :meth:`encode` made bytes of.

        Raises
        ------
        ValueError
            The bytes are no message.
        """
        try:
            name, op, code, dimensions = _HEADER.unpack_from(data)
            shape = struct.unpack_from(f"<{dimensions}Q", data, _HEADER.size)
            start, dtype = _HEADER.size + 8 * dimensions, _DTYPES[code]
            if len(data) - start != math.prod(shape) * dtype.itemsize:
                raise ValueError("a message whose length is not that of its array")
            return cls(_NAMES[name], op, np.frombuffer(data, dtype, offset=start).reshape(shape))
        except (struct.error, LookupError) as error:
            raise ValueError(f"not a message: {error}") from error


class Peers:
    """The connections of one rank to all others; made when all are there.

    Attributes
    ----------
    processes
        Id of each rank's process.
    """

    def __init__(self, ranks: int, uid: bytes, rank: int) -> None:
        self.processes = [os.getpid()] * ranks
        self._connections: dict[int, Connection] = {}
        self._arrived: dict[tuple[int, bool], deque[Message]] = {}  # by sender, and whether it is for a pair
        self._gone: set[int] = set()
        self._news = threading.Condition()
        try:
            self._meet_all(uid, rank)
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"there is a rank {rank} of this communicator already: each rank comes once for a unique id"
                ) from None
            raise CudaError(f"the ranks could not meet: {error.strerror}", "CUDA_ERROR_OPERATING_SYSTEM") from error
        threading.Thread(target=self._receive, name=f"cudatool.nccl rank {rank}", daemon=True).start()

    def _meet_all(self, uid: bytes, rank: int) -> None:
        ranks = len(self.processes)
        hello = _HELLO.pack(rank, ranks, os.getpid())
        until = time.monotonic() + _PATIENCE_S
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(_address(uid, rank))
            listener.listen(ranks)
            for lower in range(rank):
                self._meet(_connect(uid, lower, until), hello)
            for _ in range(rank + 1, ranks):
                self._meet(_accept(listener, uid, until), hello)

    def _meet(self, connection: Connection, hello: bytes) -> None:
        try:
            connection.send_bytes(hello)
            rank, ranks, process = _HELLO.unpack(connection.recv_bytes(_HELLO.size))
        except (EOFError, OSError, struct.error):
            raise CudaError("a rank ended while the ranks were meeting", "CUDA_ERROR_UNKNOWN") from None
        if ranks != len(self.processes) or rank >= ranks or rank in self._connections:
            raise UsageError(f"a rank {rank} of {ranks} came to a communicator of {len(self.processes)}")
        self.processes[rank] = process
        self._connections[rank] = connection

    def send(self, ranks: Sequence[int], message: Message) -> None:
        """Send a message to other ranks."""
        data = message.encode()
        for rank in ranks:
            try:
                self._connections[rank].send_bytes(data)
            except OSError:
                raise _lost(rank) from None

    def take(self, rank: int, *, paired: bool) -> Message:
        """Wait for the next message of a rank, and return it.

        Parameters
        ----------
        paired
            The next one of a send, else the next one of an operation of all ranks.

        Raises
        ------
        CudaError
            The rank has ended, or has closed its communicator.
        """
        with self._news:
            while not self._arrived.get((rank, paired)):
                if rank in self._gone:
                    raise _lost(rank)
                self._news.wait()
            return self._arrived[rank, paired].popleft()

    def close(self) -> None:
        """Close the connections to the others."""
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
                    message = Message.decode(connection.recv_bytes())
                except (EOFError, OSError, ValueError):  # a rank that does not talk as ours do is lost, too
                    del ranks[connection]
                    with self._news:
                        self._gone.add(rank)
                        self._news.notify_all()
                    continue
                with self._news:
                    self._arrived.setdefault((rank, message.name in PAIRED), deque()).append(message)
                    self._news.notify_all()


# ---- finding each other ----


def _address(uid: bytes, rank: int) -> str:
    """Return the name of a rank's socket, which says nothing of the unique id."""
    return f"\0cudatool-nccl-{hmac.digest(uid, b'address %d' % rank, 'sha256').hex()}"


def _connect(uid: bytes, rank: int, until: float) -> Connection:
    """Return a connection to a rank, as soon as it listens."""
    while time.monotonic() < until:
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(_HANDSHAKE_S)
        try:
            there.connect(_address(uid, rank))
        except (ConnectionRefusedError, BlockingIOError):  # it does not listen yet, or too many ask at once
            there.close()
        else:
            if (connection := _admitted(there, uid, listens=False)) is not None:
                return connection
        time.sleep(_POLL_S)
    raise CudaError(f"rank {rank} did not come within {_PATIENCE_S} s", "CUDA_ERROR_TIMEOUT")


def _accept(listener: socket.socket, uid: bytes, until: float) -> Connection:
    """Return a connection to the next rank that comes. Strangers are sent away."""
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            there, _ = listener.accept()
        except TimeoutError:
            break
        there.settimeout(_HANDSHAKE_S)
        if (connection := _admitted(there, uid, listens=True)) is not None:
            return connection
    raise CudaError(f"not all ranks came within {_PATIENCE_S} s", "CUDA_ERROR_TIMEOUT")


def _admitted(there: socket.socket, uid: bytes, *, listens: bool) -> Connection | None:
    """Return the connection if the other end is a process of this user that knows the unique id; else close it.

    Each side sends a random number, and a keyed digest of both. Who listens is part of the digest, so that no side can
    be made to compute the other's.
    """
    with there:
        user = _CREDENTIALS.unpack(there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if user != os.geteuid():
            return None
        try:
            mine = secrets.token_bytes(_NONCE)
            there.sendall(mine)
            theirs = _receive_exactly(there, _NONCE)
            there.sendall(hmac.digest(uid, bytes([listens]) + mine + theirs, "sha256"))
            expected = hmac.digest(uid, bytes([not listens]) + theirs + mine, "sha256")
            if not hmac.compare_digest(expected, _receive_exactly(there, len(expected))):
                return None
        except OSError:  # it has gone, or is silent
            return None
        there.setblocking(True)
        return Connection(there.detach())


def _receive_exactly(there: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = there.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def _lost(rank: int) -> CudaError:
    return CudaError(f"rank {rank} has ended or closed its communicator", "CUDA_ERROR_UNKNOWN")
