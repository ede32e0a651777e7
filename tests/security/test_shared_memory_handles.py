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
from cudatool.sim.arena import SharedFile, Store
from cudatool.sim.results import DriverError, Result


def _shares(pipe: Any, path: str, user: int) -> None:
    """Open some files, as another user if that is asked for, and keep them until the pipe closes."""
    if user:
        os.setuid(user)
    memory = Store.new_file(4096)
    files = [memory.opened, os.memfd_create("other"), os.open(path, os.O_RDWR) if path else -1]
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
        theirs.close()  # if the process fails, the other end ends
        started.append((ours, process))
        return process.pid or 0, ours.recv()

    yield start
    for ours, process in started:
        ours.send(None)
        process.join()


def test_only_memory_that_is_shared_can_be_opened(sharing: Any) -> None:
    process, (shared, other, file) = sharing()
    ipc._open_shared(process, *shared).close()
    for number, inode in (other, file, (shared[0], shared[1] + 1), (99, shared[1]), (-1, 0)):
        with pytest.raises(OSError):
            ipc._open_shared(process, number, inode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
def test_memory_of_another_user_is_not_opened(sharing: Any) -> None:
    process, (shared, *_) = sharing(OTHER_USER)
    with pytest.raises(OSError):
        ipc._open_shared(process, *shared)


def test_no_process_can_cut_shared_memory_short() -> None:
    memory = Store.new_file(8192)
    with pytest.raises(PermissionError):  # who has it mapped would die of it
        os.ftruncate(memory.opened, 0)
    memory.close()


@pytest.mark.parametrize("kind", ["a file", "memory that can be cut short"])
def test_other_files_are_no_shared_memory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").write_bytes(bytes(8192))
    file = os.open(tmp_path / "data", os.O_RDWR) if kind == "a file" else os.memfd_create(Store.NAME)
    with pytest.raises(OSError, match="is not a file descriptor of shared memory"):
        SharedFile(file)


def test_a_file_of_the_program_under_a_number_of_ours_is_left_alone(tmp_path: Path) -> None:
    memory = Store.new_file(8192)
    number = memory.opened
    own = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    os.write(own, b"x" * 8192)
    os.dup2(own, number)  # the program closed the number, and got it for its file
    with pytest.raises(DriverError) as refused:
        memory.map_all(4096)
    Store.clear(memory, 0, 4096)
    memory.close()
    os.fstat(number)  # it is still open
    for descriptor in (own, number):
        os.close(descriptor)
    assert (refused.value.result, (tmp_path / "data").read_bytes()) == (Result.OPERATING_SYSTEM, b"x" * 8192)
