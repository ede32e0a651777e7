"""What a handle of shared memory can make a process open: nothing but memory that cudatool shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from other_user import OTHER_USER

from cudatool.sim import ipc
from cudatool.sim.memory import Store


def _shares(pipe: Any, path: str, user: int) -> None:
    """Open some files, as another user if that is asked for, and keep them until the pipe closes."""
    if user:
        os.setuid(user)
    files = [Store.new_file(4096), os.memfd_create("other"), os.open(path, os.O_RDWR) if path else -1]
    pipe.send([(file, os.fstat(file).st_ino if file >= 0 else 0) for file in files])
    try:
        pipe.recv()
    except EOFError:
        pass


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Any]:
    context = get_context("spawn")
    started: list[tuple[Any, Any]] = []

    def start(user: int = 0) -> tuple[int, list[tuple[int, int]]]:
        path = tmp_path / "data"
        path.write_bytes(b"secret")
        ours, theirs = context.Pipe()
        process = context.Process(target=_shares, args=(theirs, "" if user else str(path), user))
        process.start()
        started.append((ours, process))
        return process.pid or 0, ours.recv()

    yield start
    for ours, process in started:
        ours.send(None)
        process.join()


def test_only_memory_that_is_shared_can_be_opened(sharing: Any) -> None:
    process, (shared, other, file) = sharing()
    os.close(ipc._open_shared(process, *shared))
    for number, inode in (other, file, (shared[0], shared[1] + 1), (99, shared[1]), (-1, 0)):
        with pytest.raises(OSError):
            ipc._open_shared(process, number, inode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
def test_memory_of_another_user_is_not_opened(sharing: Any) -> None:
    process, (shared, *_) = sharing(OTHER_USER)
    with pytest.raises(OSError):
        ipc._open_shared(process, *shared)
