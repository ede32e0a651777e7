"""What other users, and other processes of this user, can do to the sockets of `cudatool.nccl`."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import AuthenticationError, Client
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from other_user import run_as_other_user

from cudatool.errors import CudaError
from cudatool.nccl import _peers
from cudatool.nccl._calls import DTYPES, Name
from cudatool.nccl._host import library
from cudatool.nccl._peers import Message, Peers


class Waiting:
    """Rank 0 of two, which waits for rank 1."""

    def __init__(self) -> None:
        self.uid = library.unique_id()
        self.peers: Any = None
        self._thread = threading.Thread(target=self._meet, daemon=True)
        self._thread.start()
        self.name = _peers._address(self.uid, 0)
        until_there(self.name)

    def _meet(self) -> None:
        self.peers = Peers(2, self.uid, 0)

    def joined(self) -> tuple[Peers, Peers]:
        """Let rank 1 come, and return both."""
        other = Peers(2, self.uid, 1)
        self._thread.join()
        return self.peers, other


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    rank = Waiting()
    yield rank
    if rank.peers is None:
        rank.joined()
    rank.peers.close()


def until_there(name: str) -> None:
    deadline = time.monotonic() + 60
    while name not in abstract_sockets():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def abstract_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {f"\0{name[1:]}" for line in lines if (name := line.split()[-1]).startswith("@")}


def works(ranks: tuple[Peers, Peers]) -> bool:
    """Whether two ranks that met can still send each other something."""
    first, second = ranks
    first.send([1], Message(Name.SEND, 0, np.arange(3.0)))
    return [0.0, 1.0, 2.0] == second.take(0, paired=True).values.tolist()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_the_name_of_the_socket_says_nothing_of_the_key(waiting: Waiting) -> None:
    key = waiting.uid.rstrip(b"\0").decode()
    assert not any(key[start : start + 8] in name for name in abstract_sockets() for start in range(len(key) - 8))


def test_another_user_is_sent_away_even_with_the_key(waiting: Waiting) -> None:
    program = f"""
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(20)
        there.connect({waiting.name!r})
        print(_peers._admitted(there, {waiting.uid!r}, listens=False))
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(20)
        there.connect({waiting.name!r})
        try:
            print(there.recv(100))
        except ConnectionResetError:
            print(b"")
    """
    # `_admitted` would refuse our process; what is asked here is whether it refuses the stranger's.
    lenient = "import socket, os\nfrom cudatool.nccl import _peers\n_peers.os.geteuid = lambda: 0\n"
    assert "None\nb''\n" == run_as_other_user(lenient, program)
    assert works(waiting.joined())


def test_a_socket_of_another_user_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_peers, "_PATIENCE_S", 1)
    uid = library.unique_id()
    program = f"""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind({_peers._address(uid, 0)!r})
        listener.listen()
        listener.settimeout(20)
        there, _ = listener.accept()
        print(there.recv(100))
    """
    said: list[str] = []
    stranger = threading.Thread(target=lambda: said.append(run_as_other_user("import socket", program)))
    assert "" == run_as_other_user("", "")  # skips here, not on the thread
    stranger.start()
    until_there(_peers._address(uid, 0))
    with pytest.raises(CudaError, match="rank 0 did not come"):
        Peers(2, uid, 1)
    stranger.join()
    assert ["b''\n"] == said  # not even a random number was sent


def test_a_process_without_the_key_is_sent_away(waiting: Waiting) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.settimeout(20)
        there.connect(waiting.name)
        assert _peers._admitted(there, b"another key".ljust(128, b"\0"), listens=False) is None
    assert works(waiting.joined())


def test_a_process_that_repeats_what_it_hears_is_sent_away(waiting: Waiting) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.settimeout(20)
        there.connect(waiting.name)
        there.sendall(there.recv(32))  # the rank's own random number, and its own proof
        there.sendall(there.recv(32))
        assert there.recv(100) == b""
    assert works(waiting.joined())


def test_a_process_that_hangs_up_does_not_end_the_meeting(waiting: Waiting) -> None:
    for _ in range(10):
        there = socket.socket(socket.AF_UNIX)
        there.connect(waiting.name)
        there.close()
    assert works(waiting.joined())


def test_a_pickle_that_arrives_is_not_loaded(waiting: Waiting, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    # An assertion is how multiprocessing says that the other side does not speak its protocol.
    with pytest.raises((AuthenticationError, AssertionError, EOFError, OSError)):
        Client(waiting.name, "AF_UNIX", authkey=waiting.uid).send(Touch(mark))
    first, second = waiting.joined()
    second._connections[0].send(Touch(mark))  # from a rank that was admitted
    with pytest.raises(CudaError, match="rank 1 has ended"):
        first.take(1, paired=False)
    assert not mark.exists()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_message_comes_back_as_it_was(dtype: np.dtype[Any]) -> None:
    for shape in ((), (0,), (3,), (2, 0, 5), (2, 3, 4)):
        values = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
        found = Message.decode(Message(Name.REDUCE, 3, values).encode())
        assert (Name.REDUCE, 3, dtype, shape) == (found.name, found.op, found.values.dtype, found.values.shape)
        assert found.values.tobytes() == values.tobytes()


def test_anything_that_is_no_message_is_refused() -> None:
    good = Message(Name.REDUCE, 0, np.zeros((2, 3), ml_dtypes.bfloat16)).encode()
    bad = [good[:cut] for cut in range(len(good))]
    bad += [good + b"\0", b"\xff" + good[1:], good[:2] + b"\xff" + good[3:], good[:3] + b"\xff" + good[4:]]
    bad += [bytes([0, 0, 0, 2, *b"\xff" * 16]), pickle.dumps({})]
    for data in bad:
        with pytest.raises(ValueError):
            Message.decode(data)
