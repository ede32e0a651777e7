"""What is no file, or expands without end, as the input of each command that reads one: one line, at once."""

from __future__ import annotations

import json
import lzma
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hostile_traces import records_of, trace_bytes
from warm_process import run_python

from cudatool.errors import FileFormatError, UsageError
from cudatool.ptx import PtxError, device_code, ptx_for
from cudatool.sanitize import Baseline, parse_rules
from cudatool.trace import reader
from cudatool.trace.events import Kind
from cudatool.trace.file import CHUNK_HEADER, CHUNK_MAGIC, FILE_HEADER, MAGIC, VERSION, Chunk

COMMANDS = (
    ["snapshot", "{}"],
    ["leaks", "{}"],
    ["diff", "{}", "{}"],
    ["export", "{}", "--to", "sqlite", "-o", "out"],
    ["replay", "{}"],
    ["sanitize", "{}"],
    ["run", "{}"],
    ["ptx", "{}"],
    ["sanitize", "--baseline", "{}", "sound.ctrace"],
    ["sanitize", "--suppress", "@{}", "sound.ctrace"],
)
_CODE = """
import contextlib, io, json, resource, sys
from cudatool.cli import main
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["cudatool", *words]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as error:
            ended.append([error.code or 0, said.getvalue()])
most = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
json.dump([ended, int(most)], open("ended.json", "w"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sound.ctrace").write_bytes(trace_bytes(records_of({"kind": Kind.DEVICE_SYNCHRONIZE}), header={}))
    return tmp_path


def run(folder: Path, commands: Sequence[list[str]], name: str) -> list[tuple[int, str]]:
    """Return status and messages of commands that get the file `name`, run in one process with little time and memory."""
    texts = [[word.replace("{}", name) for word in command] for command in commands]
    done = run_python(_CODE, json.dumps(texts), folder=folder, environment={"CUDATOOL_DEVICE": "sim"}, timeout_s=60)
    assert 0 == done.returncode, done.stderr
    ended, most = json.loads((folder / "ended.json").read_text())
    assert len(texts) == len(ended)
    assert most < 512 << 10  # KiB
    assert not any("Traceback" in said for _, said in ended), ended
    return [(status, said) for status, said in ended]


def assert_refused(done: list[tuple[int, str]]) -> None:
    for status, said in done:
        lines = [line for line in said.splitlines() if line.startswith("cudatool: error: ")]
        assert (2, 1) == (status, len(lines)), said


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "/dev/zero"])
def test_what_is_no_file_is_refused_by_every_command(folder: Path, kind: str) -> None:
    name = kind if kind.startswith("/") else "input.pickle"
    path = folder / "input.pickle"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(folder)  # the name of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(here)
    assert_refused(run(folder, COMMANDS, name))


def sparse_header(path: Path) -> None:
    path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION, (1 << 32) - 1, 0))
    os.truncate(path, 1 << 33)


def sparse_chunk(kind: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content = trace_bytes(records_of({"kind": Kind.DEVICE_SYNCHRONIZE}), header={}, closed=False)
        chunk = CHUNK_HEADER.pack(CHUNK_MAGIC, kind, 1 << 33, 1 << 33, 0, 0, 0)
        path.write_bytes(content + chunk)
        os.truncate(path, (1 << 33) + (1 << 20))

    return write


def sparse_library(path: Path) -> None:
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, 2, 1)
    sections = bytes(struct.pack("<IIQQQQ", 1, 1, 0, 0, 1 << 20, 1 << 28).ljust(64, b"\0"))
    sections += struct.pack("<IIQQQQ", 13, 3, 0, 0, 64 + 128, 32).ljust(64, b"\0")
    path.write_bytes(header + sections + b"\0.nv_fatbin\0\0.shstrtab\0")
    os.truncate(path, (1 << 28) + (2 << 20))


@pytest.mark.parametrize(
    ("write", "command"),
    [
        (sparse_header, ["snapshot", "{}"]),
        (sparse_chunk(Chunk.TABLES), ["snapshot", "{}"]),
        (sparse_chunk(Chunk.RECORDS), ["snapshot", "{}"]),
        (sparse_chunk(Chunk.FACTS), ["snapshot", "{}"]),
        (sparse_chunk(99), ["snapshot", "{}"]),
        (sparse_library, ["ptx", "{}"]),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 34), ["snapshot", "{}"]),
    ],
    ids=["header", "tables", "records", "facts", "unknown chunk", "library", "zeros"],
)
def test_holes_of_a_sparse_file_take_neither_memory_nor_time(
    folder: Path, write: Callable[[Path], None], command: list[str]
) -> None:
    write(folder / "sparse")
    ((status, _),) = run(folder, [command], "sparse")
    assert status in (0, 2)


def test_an_endless_text_is_refused(folder: Path) -> None:
    descriptor = os.open(folder / "long.ptx", os.O_CREAT | os.O_WRONLY)
    os.truncate(descriptor, 1 << 40)
    os.close(descriptor)
    done = run(folder, [["ptx", "{}"]], "long.ptx")
    assert_refused(done)
    assert "it is larger than 256 MiB" in done[0][1]


@pytest.mark.parametrize("reading", [Baseline.read, lambda path: parse_rules([f"@{path}"])])
def test_baselines_and_rules_are_files(tmp_path: Path, reading: Callable[[str], object]) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises((FileFormatError, UsageError), match="it is a"):
            reading(str(path))


def fatbin(header: int, size: int, payload: bytes = b"", magic: int = 0xBA55ED50) -> bytes:
    return struct.pack("<IHHQ", magic, 1, header, size) + payload


def form(kind: int, flags: int, original: int, text: bytes, header: int = 72) -> bytes:
    entry = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, header, len(text), len(text), 64, 3, 8, 90, 64, 0, flags, 0, original
    )
    return entry.ljust(72, b"\0") + text


@pytest.mark.parametrize(
    "data",
    [
        fatbin(0, 0),
        fatbin(0, (1 << 64) - 16),
        fatbin(16, 64, form(1, 0, 0, b"", header=0)[:64]),
        fatbin(16, 72, form(1, 0, 0, b"", header=0)),
    ],
    ids=["empty header", "negative size", "entry without a header", "entry of nothing"],
)
def test_a_fatbin_that_goes_nowhere_is_damaged(data: bytes) -> None:
    with pytest.raises(PtxError, match="damaged"):
        device_code(data)


@pytest.mark.parametrize("flags", [0x2000, 0x8000], ids=["LZ4", "Zstandard"])
def test_ptx_that_expands_without_measure_is_refused(flags: int) -> None:
    bomb = form(1, flags, 200 << 20, b"\x1f\0\x01\0" + b"\xff" * 4000)
    with pytest.raises(PtxError, match="PTX of 209715200 bytes, compressed to"):
        ptx_for(fatbin(16, len(bomb), bomb), 90)


def test_many_small_ptx_that_expand_together_are_refused() -> None:
    def unit(count: int) -> bytes:
        text = b"\x1f\0\x01\0" + b"\xff" * (count // 255) + b"\0"  # a byte, repeated
        return fatbin(16, 72 + len(text), form(1, 0x2000, count, text))

    assert 1 << 20 == len(ptx_for(unit(1 << 20).replace(b"\0\x01\0\xff", b"x\x01\0\xff"), 90)[0])
    with pytest.raises(PtxError, match="PTX of more than 64 times"):
        ptx_for(b"".join(unit(1 << 20).replace(b"\0\x01\0\xff", b"x\x01\0\xff") for _ in range(200)), 90)


def test_a_trace_of_zeros_keeps_what_came_before(tmp_path: Path) -> None:
    sparse_chunk(Chunk.RECORDS)(tmp_path / "x.ctrace")
    trace = reader.read(tmp_path / "x.ctrace")
    assert 1 == len(trace.records)
    assert "there are zeros where events should be" in trace.notes[0]


def test_statistics_beside_a_snapshot_are_typed_and_said_if_they_are_not(folder: Path) -> None:
    from click.testing import CliRunner

    from cudatool.cli import group

    packed = Path(__file__).parents[1] / "data" / "streams_default.pickle.xz"
    (folder / "x.pickle").write_bytes(lzma.decompress(packed.read_bytes()))
    for facts, said in (
        ({"stats": {"a": "x"}, "memory_fraction": "half", "device_total_bytes": []}, ["memory_fraction", "device_total_bytes"]),
        ({"stats": [1]}, ["stats"]),
        ([1], ["not a JSON object"]),
        ({"memory_fraction": None, "other": "x"}, []),
    ):  # fmt: skip
        (folder / "x.stats.json").write_text(json.dumps(facts))
        done = CliRunner().invoke(group, ["replay", "--check", str(folder / "x.pickle")])
        assert done.exception is None or isinstance(done.exception, SystemExit)
        lines = [line for line in done.stderr.splitlines() if "stats.json" in line]
        assert len(said) == len(lines) and all(one in line for one, line in zip(said, lines, strict=True)), lines
