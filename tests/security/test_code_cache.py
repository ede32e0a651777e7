"""Compiled code that is kept between processes comes from this user, is whole, and does not fill the disk."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from other_user import OTHER_USER

from cudatool import code_cache
from cudatool.code_cache import CodeCache
from cudatool.errors import ConfigError

KEY = "0123456789abcdef"
NAME = f"{KEY}.code"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache; it is not there yet."""
    path = tmp_path / "new" / "cache"
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(path))
    monkeypatch.delenv("CUDATOOL_CACHE_SIZE", raising=False)
    monkeypatch.setattr(code_cache, "_said", set())
    return path


@pytest.fixture
def cache(folder: Path) -> CodeCache:
    """A cache with one entry."""
    made = CodeCache("native")
    made.put(KEY, b"code")
    assert made.get(KEY) == b"code"
    return made


def entries(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def test_what_was_put_is_found_by_other_processes(cache: CodeCache) -> None:
    program = f"from cudatool.code_cache import CodeCache\nprint(CodeCache('native').get({KEY!r}))"
    assert "b'code'\n" == subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    assert CodeCache("torch").get(KEY) is None  # another compiler's


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o002])
def test_folders_and_files_are_the_users_alone_whatever_the_umask(folder: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        CodeCache("native").put(KEY, b"code")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder.parent, folder, *folder.rglob("*"))}
    assert {"new": 0o700, "cache": 0o700, "native": 0o700, NAME: 0o600} == modes


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("which", [".", "native"])
def test_a_folder_that_others_can_write_is_refused_and_named_once(
    cache: CodeCache, folder: Path, mode: int, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / which).chmod(mode)
    for _ in range(3):
        assert cache.get(KEY) is None
        cache.put("other", b"code")
    assert {NAME} == entries(folder).keys()
    said = capsys.readouterr().err
    assert said.startswith(f"cudatool: compiled code is not kept in {(folder / which).resolve()}: others can write")
    assert 1 == said.count("\n")


@as_root
@pytest.mark.parametrize("which", [".", "native"])
def test_a_folder_of_another_user_is_refused(
    cache: CodeCache, folder: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chown(folder / which, OTHER_USER, OTHER_USER)
    assert cache.get(KEY) is None
    cache.put("other", b"code")
    assert {NAME} == entries(folder).keys()
    assert f"belongs to user {OTHER_USER}" in capsys.readouterr().err


@as_root
def test_a_file_of_another_user_is_not_loaded(cache: CodeCache, folder: Path) -> None:
    os.chown(folder / "native" / NAME, OTHER_USER, OTHER_USER)
    assert cache.get(KEY) is None
    cache.put(KEY, b"code")
    assert cache.get(KEY) == b"code"


def test_a_file_that_others_can_write_is_not_loaded(cache: CodeCache, folder: Path) -> None:
    (folder / "native" / NAME).chmod(0o666)
    assert cache.get(KEY) is None


@pytest.mark.parametrize("which", [".", "native"])
def test_a_link_to_a_folder_is_refused(
    cache: CodeCache, folder: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder if which == "." else folder / which
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    assert cache.get(KEY) is None
    assert f"{path}: it is a symbolic link" in capsys.readouterr().err


def test_a_link_to_a_file_is_not_followed(cache: CodeCache, folder: Path, tmp_path: Path) -> None:
    kept = folder / "native" / NAME
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    assert cache.get(KEY) is None
    cache.put(KEY, b"new")
    assert cache.get(KEY) == b"new"
    assert not kept.is_symlink() and b"new" not in (tmp_path / "elsewhere").read_bytes()


def test_a_pipe_in_place_of_a_file_does_not_block(cache: CodeCache, folder: Path) -> None:
    (folder / "native" / NAME).unlink()
    os.mkfifo(folder / "native" / NAME, 0o600)
    assert cache.get(KEY) is None


def test_a_damaged_entry_counts_as_none_and_is_written_again(cache: CodeCache, folder: Path) -> None:
    kept = folder / "native" / NAME
    whole = kept.read_bytes()
    damaged = [whole[:cut] for cut in range(len(whole))]
    damaged += [whole + b"\0", whole[:-1] + b"\0", b"\0" + whole[1:]]
    for content in damaged:
        kept.write_bytes(content)
        assert cache.get(KEY) is None, content
    cache.put(KEY, b"code")
    assert whole == kept.read_bytes()


def test_an_entry_under_another_name_counts_as_none(cache: CodeCache, folder: Path) -> None:
    (folder / "native" / NAME).rename(folder / "native" / "other.code")
    assert cache.get("other") is None


def test_what_is_used_stays_and_the_rest_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_SIZE", "10KiB")
    cache, other = CodeCache("native"), CodeCache("torch")
    other.put("early", bytes(1000))
    for number in range(100):
        cache.put(f"{number}", bytes(1000))
        assert cache.get("0") is not None
        assert sum(entries(folder).values()) <= 10 << 10
    assert cache.get("99") is not None and cache.get("1") is None and other.get("early") is None
    cache.put("large", bytes(11 << 10))
    assert cache.get("large") is None and cache.get("99") is not None


def test_nothing_but_files_of_ours_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_SIZE", "10KiB")
    others = [folder / "thesis.txt", folder / "photos" / "one.jpg", folder / "torch" / "train.py", folder / "x" / NAME]
    for other in others:  # as where CUDATOOL_CACHE_DIR names the user's home
        other.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        other.write_bytes(bytes(20 << 10))
        os.utime(other, (0, 0))
    cache = CodeCache("native")
    for number in range(40):
        cache.put(f"{number}", bytes(1000))
    assert all(other.exists() for other in others)
    assert cache.get("39") is not None and cache.get("0") is None


def test_a_size_of_zero_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_SIZE", "0")
    CodeCache("native").put(KEY, b"code")
    assert CodeCache("native").get(KEY) is None and not entries(folder)


def test_a_size_that_is_none_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_SIZE", "much")
    with pytest.raises(ConfigError, match="CUDATOOL_CACHE_SIZE: 'much' is not a size"):
        CodeCache("native").put(KEY, b"code")
    program = tmp_path / "program.py"
    program.write_text("import cudatool\ncudatool.zeros(1)\n")
    command = [sys.executable, "-m", "cudatool", "run", "--device", "sim", "-o", str(tmp_path / "trace"), str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "CUDATOOL_CACHE_SIZE: 'much' is not a size" in done.stderr.splitlines()[-1]


def test_a_file_that_was_never_finished_goes(cache: CodeCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, recent = folder / "native" / "left.code.new", folder / "native" / "recent.code.new"
    left.write_bytes(b"half")
    recent.write_bytes(b"half")
    os.utime(left, (0, 0))
    os.utime(folder, (0, 0))  # nor has anything been put here since
    CodeCache("native").put("next", b"code")
    assert {NAME, "next.code", "recent.code.new"} == entries(folder).keys()


def test_processes_that_follow_each_other_do_not_all_look_how_much_there_is(
    cache: CodeCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of 90,000 files took 0.7 s of each process that put something there."""
    looked: list[int] = []
    monkeypatch.setattr(code_cache, "_evict", looked.append)
    recently = os.stat(folder).st_mtime
    for now, expected in ((recently + 59, 0), (recently + 61, 1), (recently - 1, 1)):
        monkeypatch.setattr(code_cache.time, "time", lambda now=now: now)
        looked.clear()
        process = CodeCache("native")
        process.put("one", b"code")
        process.put("two", b"code")
        assert expected == len(looked), now
    monkeypatch.setattr(code_cache.time, "time", lambda: recently)
    looked.clear()
    monkeypatch.setenv("CUDATOOL_CACHE_SIZE", "64KiB")
    process = CodeCache("native")
    for number in range(200):  # however recently: what one process writes unseen is a 64th of that, eight of these
        process.put(f"{number}", bytes(100))
    assert 25 == len(looked)


_WORKER = """
import random, sys
from cudatool.code_cache import CodeCache
cache, chance = CodeCache("native"), random.Random(int(sys.argv[1]))
for _ in range(300):
    key = str(chance.randrange(40))
    data = key.encode() * 300
    found = cache.get(key)
    assert found in (None, data), key
    if found is None:
        cache.put(key, data)
"""


def test_processes_that_write_and_evict_at_once_see_whole_entries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_SIZE", "8KiB")
    command = [sys.executable, "-c", _WORKER]
    workers = [subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE) for seed in range(4)]
    for worker in workers:
        _, said = worker.communicate(timeout=100)
        assert worker.returncode == 0, said.decode()
    assert sum(entries(folder).values()) <= 2 * (8 << 10)  # each looks at the whole again after a part of the limit


def test_a_folder_that_is_exchanged_all_the_time_gives_our_code_or_none(
    cache: CodeCache, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked and what is read are the same file: no time between the two."""
    hostile = tmp_path / "hostile"
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(hostile))
    cache.put(KEY, b"evil")
    hostile.chmod(0o777)
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(folder))
    libc, here, exchanges = ctypes.CDLL(None), -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, bytes(folder), here, bytes(hostile), exchanges):
        pytest.skip("this file system cannot exchange folders")
    over = threading.Event()

    def exchange() -> None:
        while not over.is_set():
            libc.renameat2(here, bytes(folder), here, bytes(hostile), exchanges)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        assert {b"code", None} == {cache.get(KEY) for _ in range(2000)}
    finally:
        over.set()
        thread.join()


# ---- where it is ----


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files of a user whose home is none."""
    monkeypatch.delenv("CUDATOOL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(code_cache, "_said", set())
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    return tmp_path


def test_the_cache_is_where_the_user_wants_it(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, expected in (
        ("HOME", homeless / "home", homeless / "home" / ".cache" / "cudatool"),
        ("XDG_CACHE_HOME", homeless / "xdg", homeless / "xdg" / "cudatool"),
        ("CUDATOOL_CACHE_DIR", homeless / "own", homeless / "own"),
    ):
        monkeypatch.setenv(name, str(value))
        CodeCache("native").put(KEY, b"code")
        assert (expected / "native" / NAME).exists()


def test_a_user_without_a_home_has_a_cache_of_their_own(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    CodeCache("native").put(KEY, b"code")
    path = homeless / f"cudatool-{os.geteuid()}"
    assert 0o700 == path.stat().st_mode & 0o777
    assert CodeCache("native").get(KEY) == b"code"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home is known
    assert CodeCache("native").get(KEY) == b"code"
    path.chmod(0o777)  # as one that somebody else made there
    assert CodeCache("native").get(KEY) is None
    assert "others can write to it" in capsys.readouterr().err
