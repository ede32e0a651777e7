"""Result files are written whole or not at all."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from cudatool.errors import OutputError, UsageError
from cudatool.files import (
    KeptDescriptor,
    check_outputs,
    check_writable,
    open_input,
    read_input,
    replacing,
    write_whole,
)
from cudatool.sanitize import Outputs, Report, ReportContext


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text("good")
    return path


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(good, monkeypatch, call):
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(OutputError, match="No space left on device"):
        write_whole(str(good), "new")
    assert "good" == good.read_text()
    assert [good] == list(good.parent.iterdir())


def test_a_write_replaces_the_old_file_and_keeps_a_link_to_it(good):
    link = good.with_name("link.json")
    link.symlink_to(good)
    write_whole(str(link), "new \u20ac \udcff")
    assert link.is_symlink()
    assert "new \u20ac \\udcff" == good.read_text(encoding="utf-8")


def test_a_file_stays_as_it_was_if_the_block_raises(good):
    with pytest.raises(KeyError), replacing(good) as name:
        Path(name).write_text("half")
        raise KeyError
    assert "good" == good.read_text()
    assert [good] == list(good.parent.iterdir())


@pytest.mark.parametrize("where", ["missing/result", "file/result"])
def test_a_file_without_a_directory_is_an_output_error(tmp_path, where):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="its directory does not exist"):
        write_whole(tmp_path / where, "new")


def test_a_pipe_or_device_is_written_to_in_place(tmp_path):
    check_writable("/dev/null")
    write_whole("/dev/null", "gone")
    assert not Path("/dev/null").is_file()


def test_a_pipe_without_a_reader_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_writable(str(tmp_path / "pipe"))  # the reader may come later
    with pytest.raises(OutputError, match="a pipe that no process reads"):
        write_whole(tmp_path / "pipe", "lost")


def test_the_reader_of_a_pipe_gets_the_result_and_no_end_of_file_before_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        check_writable(str(tmp_path / "pipe"))
        with select.epoll() as events:
            events.register(reader, select.EPOLLHUP)
            assert [] == events.poll(0)  # no writer has come and gone
        write_whole(tmp_path / "pipe", "new")
        assert b"new" == reader.read()


def test_a_kept_descriptor_has_a_high_number_and_leaves_that_of_another_file_alone(tmp_path):
    kept = KeptDescriptor(os.open(tmp_path, os.O_RDONLY))
    number = kept.number
    assert number >= 512
    (tmp_path / "other").touch()
    other = os.open(tmp_path / "other", os.O_RDONLY)
    os.dup2(other, number)  # the program closed it, and got its number
    assert kept.number is None
    kept.close()
    assert os.path.sameopenfile(other, number)
    os.close(number)
    os.close(other)


@pytest.mark.parametrize("name", ["maps", "pagemap", "environ"])
def test_what_the_kernel_makes_is_no_input(name):
    with pytest.raises(OSError, match="a file that the kernel makes"):
        open_input(f"/proc/self/{name}")


def test_an_empty_file_is_an_input(tmp_path):
    (tmp_path / "empty").touch()
    assert b"" == read_input(tmp_path / "empty", 100)


def test_looking_changes_nothing(good):
    check_writable(str(good))
    assert "good" == good.read_text()
    assert [good] == list(good.parent.iterdir())


def test_one_file_that_fails_does_not_keep_the_others_from_being_written(good, tmp_path):
    (tmp_path / "folder").mkdir()
    outputs = Outputs.parse([f"json={tmp_path / 'folder' / 'a'}", f"sarif={good}"])
    (tmp_path / "folder").rmdir()  # the workload did it
    printed: list[str] = []
    with pytest.raises(OutputError, match="folder"):
        outputs.write(Report(()), ReportContext(str(tmp_path)), printed.append)
    assert good.read_text().startswith("{")
    assert printed[0].endswith("no findings")


def linked(target: Path, how: str, name: str) -> Path:
    path = target.with_name(name)
    if how == "symbolic":
        path.symlink_to(target.name)
    elif how == "hard":
        path.hardlink_to(target)
    return path if how != "same" else target


@pytest.mark.parametrize("how", ["same", "symbolic", "hard"])
@pytest.mark.parametrize("force", [False, True])
def test_a_result_never_replaces_an_input(good, how, force):
    output = linked(good, how, "other.json")
    with pytest.raises(UsageError, match="this command reads that file"):
        check_outputs([str(output)], [str(good)], force=force)
    with pytest.raises(UsageError, match="this command reads that file"):
        check_outputs([str(good)], [str(output)], force=force)
    with pytest.raises(UsageError, match="this command reads that file"):
        Outputs.parse([f"json={output}"], inputs=[str(good)])


@pytest.mark.parametrize("how", ["same", "symbolic", "hard"])
def test_two_results_never_go_to_one_file(good, how):
    with pytest.raises(UsageError, match="same file"):
        check_outputs([good, linked(good, how, "other.json")])


def test_new_files_are_the_same_if_their_paths_lead_to_one_place(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="same file"):
        check_outputs([tmp_path / "new", tmp_path / "link" / "new"])
    check_outputs([tmp_path / "new", tmp_path / "newer"], [tmp_path / "input"])
    assert [tmp_path / "link"] == list(tmp_path.iterdir())


def test_an_existing_result_is_kept_without_force(good):
    check_outputs([good], force=True)
    with pytest.raises(UsageError, match="exists; add -f"):
        check_outputs([good], force=False)


def test_what_is_no_regular_file_can_be_both():
    check_outputs(["/dev/null", "/dev/null"], ["/dev/null"], force=False)


def test_names_of_unfinished_files_cannot_be_guessed(good):
    """Who can write to the folder, too, could otherwise put a link there, to a file of the user's."""
    victim = good.with_name("victim")
    good.with_name(f"report.json.{os.getpid()}.tmp").symlink_to(victim)
    names = set()
    for _ in range(3):
        with replacing(good) as name:
            Path(name).write_text("new")
            names.add(name)
    assert 3 == len(names)
    assert not victim.exists()
