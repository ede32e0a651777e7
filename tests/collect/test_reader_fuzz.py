"""Readers against files that were cut, damaged or made up: a trace or one of our errors, in bounded memory.

Everything is random, and the same in every run.
"""

from __future__ import annotations

import gzip
import lzma
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import generated
import numpy as np
import pytest
from recordings import HERE
from snapshot_files import plain

from cudatool.collect import plain_pickle, rmm_log, torch_snapshot
from cudatool.errors import CudatoolError, FileFormatError, SnapshotFormatError
from cudatool.export import perfetto, sqlite
from cudatool.trace import Recorder, Trace, hooks, reader
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.file import FILE_HEADER, MAGIC, VERSION, Chunk, aligned, sealed_chunk

MIB = 1 << 20
ROUNDS = 25
SEEDS = range(3)
PLACES = 30
Reader = Callable[[Path], Trace]

LOG = b"Thread,Time,Action,Pointer,Size,Stream\n" + b"".join(
    b"%d,14:%02d:19.998533,%s,0x30a%06x,%d,0x%x\n" % (i % 3, i, (b"allocate", b"free")[i % 2], i // 2, 256 * i, i % 4)
    for i in range(60)
)


def recorded(path: Path) -> bytes:
    """Return the bytes of a recording of ours with records, stacks and ranges."""
    with Recorder(path, header={"argv": ["x"]}):
        for i in range(40):
            hooks.emit(Kind.RANGE_PUSH, name=f"step {i}")
            hooks.emit(Kind.MEM_ALLOC, device=0, address=i << 20, size=1 << 20, name="cuMemAlloc")
            hooks.emit(Kind.KERNEL_LAUNCH, device=0, correlation=i + 1, name=f"k{i % 3}")
            hooks.emit(Kind.EXECUTION, device=0, correlation=i + 1, aux0=i, aux1=i + 1)
            hooks.emit(Kind.RANGE_POP)
    return path.read_bytes()


@pytest.fixture(params=["snapshot", "snapshot.xz", "rmm", "ctrace"])
def sound(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Reader, bytes]:
    """A reader, and the bytes of a file that it reads."""
    packed = (HERE / "graphs__default.pickle.xz").read_bytes()
    if request.param.startswith("snapshot"):
        return torch_snapshot.read, packed if request.param.endswith("xz") else lzma.decompress(packed)
    if request.param == "rmm":
        return rmm_log.read, LOG
    return reader.read, recorded(tmp_path / "recorded")


def outcome(read: Reader, path: Path, *, limit: int = 128 * MIB) -> Trace | CudatoolError:
    """Return what reading gives. Any other exception, and more memory than `limit`, fails the test."""
    tracemalloc.start()
    try:
        result: Trace | CudatoolError
        try:
            result = read(path)
        except CudatoolError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
            result = error
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
    return result


def assert_whole(trace: Trace) -> None:
    """Check that every index in the records points into its table."""
    for field, table in (("name", trace.names), ("stack", trace.stacks), ("thread", trace.threads)):
        assert int(trace.records[field].max(initial=0)) < len(table)
    assert all(0 <= frame < len(trace.frames) for stack in trace.stacks for frame in stack)


def check(read: Reader, path: Path, content: bytes) -> Trace | CudatoolError:
    path.write_bytes(content)
    result = outcome(read, path)
    if isinstance(result, Trace):
        assert_whole(result)
    return result


def test_the_sound_files_are_traces(sound: tuple[Reader, bytes], tmp_path: Path) -> None:
    read, content = sound
    result = check(read, tmp_path / "x", content)
    assert isinstance(result, Trace)
    assert len(result.records) > 50


def test_a_file_cut_anywhere(sound: tuple[Reader, bytes], tmp_path: Path) -> None:
    read, content = sound
    chance = random.Random(1)
    for length in [0, 1, 2, 7, *(chance.randrange(min(len(content), 60_000)) for _ in range(ROUNDS))]:
        check(read, tmp_path / "x", content[:length])


@pytest.mark.parametrize("seed", SEEDS)
def test_flipped_bits(sound: tuple[Reader, bytes], tmp_path: Path, seed: int) -> None:
    read, content = sound
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 8, 64))):
            damaged[chance.randrange(min(len(damaged), 60_000))] ^= 1 << chance.randrange(8)
        check(read, tmp_path / "x", bytes(damaged))


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_removed_repeated_and_made_up(sound: tuple[Reader, bytes], tmp_path: Path, seed: int) -> None:
    read, content = sound
    content = content[:60_000]
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        begin = chance.randrange(len(content))
        end = min(begin + chance.choice((1, 4, 8, 64, 4096)), len(content))
        piece = chance.choice((b"", content[begin:end] * 2, chance.randbytes(end - begin), b"\xff" * (end - begin)))
        check(read, tmp_path / "x", content[:begin] + piece + content[end:])


@pytest.mark.parametrize("read", [torch_snapshot.read, rmm_log.read, reader.read])
def test_noise(read: Reader, tmp_path: Path) -> None:
    chance = random.Random(2)
    for start in (b"", b"\x80\x04", b"\x80\x04}", b"Thread,Time,Action,Pointer,Size,Stream\n", MAGIC, b"\xfd7zXZ\x00"):
        for _ in range(20):
            check(read, tmp_path / "x", start + chance.randbytes(chance.randrange(2000)))


# Snapshots: sound pickles with hostile values in them.


def laughs() -> list[Any]:
    """Return a list that is 10 to the 60 strings long, once written out."""
    result: list[Any] = ["ha"]
    for _ in range(60):
        result = [result] * 10
    return result


def deep() -> list[Any]:
    """Return a list in a list in a list ..."""
    result: list[Any] = []
    for _ in range(400):
        result = [result]
    return result


def endless() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


def endless_dict() -> dict[str, Any]:
    result: dict[str, Any] = {}
    result["frames"] = result["segments"] = result["addr"] = result
    return result


HOSTILE: dict[str, Callable[[], Any]] = {
    **{str(n): lambda n=n: n for n in (-1, -(2**63), 2**31, 2**47, 2**48, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**120)},
    **{str(n): lambda n=n: n for n in (float("nan"), float("inf"), -0.5, 1e300, True, None)},
    "digits": lambda: "9" * 5000,
    "long text": lambda: "x" * 100_000,
    "half a character": lambda: "\ud800",
    "bytes": lambda: b"\0" * 100,
    "empty list": list,
    "empty dict": dict,
    "tuple": lambda: (1, 2, 3),
    "laughs": laughs,
    "deep": deep,
    "endless": endless,
    "endless dict": endless_dict,
}


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of one value of each kind: the first and last of a list, each entry of a dict."""
    if isinstance(data, dict):
        keys: list[Any] = list(data)
    elif isinstance(data, list):
        keys = sorted({0, len(data) - 1}) if data else []
    else:
        return
    for key in keys:
        yield data, key
        yield from places(data[key])


def snapshot(name: str) -> dict[str, Any]:
    """Return a recording's content with something of everything that a snapshot may have."""
    data = plain(name)
    trace = data["device_traces"][0]
    del trace[60:]
    trace.append({"action": "oom", "size": 512, "device_free": 1, "stream": 0, "time_us": 5, "frames": []})
    trace.append({**trace[0], "action": "segment_map", "addr": 1 << 40, "size": 2 * MIB, "user_metadata": "here"})
    data["external_annotations"] = [{"stage": "START", "name": "step", "device": 0, "time_us": 5}]
    return data


@pytest.mark.some_of("name", ["graphs__default", "streams_default"], 1)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_values_everywhere_in_a_snapshot(tmp_path: Path, name: str, hostile: str) -> None:
    data = snapshot(name)
    everywhere = list(places(data))
    for container, key in random.Random(f"{hostile} {generated.seed}").sample(everywhere, generated.examples(PLACES)):
        kept, container[key] = container[key], HOSTILE[hostile]()
        content = pickle.dumps(data, protocol=4)
        container[key] = kept
        check(torch_snapshot.read, tmp_path / "x", content)


@pytest.mark.parametrize("seed", SEEDS)
def test_several_hostile_values_at_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        data = snapshot("graphs__default")
        everywhere = list(places(data))
        for _ in range(chance.randrange(2, 8)):
            container, key = chance.choice(everywhere)
            container[key] = HOSTILE[chance.choice(list(HOSTILE))]()
        check(torch_snapshot.read, tmp_path / "x", pickle.dumps(data, protocol=chance.randrange(2, 6)))


def test_many_devices_and_pools_do_not_take_forever(tmp_path: Path) -> None:
    data = snapshot("graphs__default")
    data["segments"] = [{**data["segments"][0], "device": i} for i in range(20_000)]
    result = check(torch_snapshot.read, tmp_path / "x", pickle.dumps(data))
    assert isinstance(result, SnapshotFormatError)


@pytest.mark.parametrize("compress", [lzma.compress, gzip.compress], ids=["xz", "gzip"])
def test_a_decompression_bomb_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(plain_pickle, "PICKLE_BYTES", 16 * MIB)
    bomb = compress(bytes(64 * MIB))
    assert len(bomb) < MIB
    (tmp_path / "x").write_bytes(bomb)
    result = outcome(torch_snapshot.read, tmp_path / "x", limit=96 * MIB)
    assert isinstance(result, SnapshotFormatError)


# RMM's log: sound lines with hostile fields.

FIELDS = (
    "",
    "-1",
    "nan",
    "inf",
    "1e9",
    "0x",
    "9" * 30,
    "9" * 5000,
    "18446744073709551615",
    "ffffffffffffffff",
    "٣",
    "\0",
)


@pytest.mark.parametrize("field", range(6))
@pytest.mark.parametrize("value", FIELDS, ids=lambda value: ascii(value)[:20])
def test_hostile_fields_in_a_log(tmp_path: Path, field: int, value: str) -> None:
    lines = LOG.decode().splitlines()
    fields = lines[9].split(",")
    fields[field] = value
    lines[9] = ",".join(fields)
    check(rmm_log.read, tmp_path / "x", "\n".join(lines).encode())


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(LOG + b"1" * (32 * MIB))
    result = outcome(rmm_log.read, tmp_path / "x", limit=4 * MIB)
    assert isinstance(result, FileFormatError)


# Our own traces: records of random bytes, sealed as if they were sound. Exports must take them, too.


@pytest.mark.parametrize("seed", SEEDS)
def test_random_records_are_read_and_exported(tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    records = np.frombuffer(chance.bytes(200 * RECORD.itemsize), RECORD).copy()
    records["kind"] = chance.choice([*map(int, Kind), 0, 255], len(records))
    for field in ("address", "size", "aux0", "aux1", "correlation", "time"):
        some = chance.random(len(records)) < 0.5
        records[field][some] = chance.integers(0, 4, int(some.sum()))
    records["size"] &= np.uint64((1 << 50) - 1)
    header = b'{"argv": [1, null], "pools": 3, "prior_records": "x", "time_axis": []}'
    head = FILE_HEADER.pack(MAGIC, VERSION, len(header), crc32(header)) + header
    content = head.ljust(aligned(len(head)), b"\0") + sealed_chunk(Chunk.RECORDS, records.tobytes())
    trace = check(reader.read, tmp_path / "x", content)
    assert isinstance(trace, Trace)
    assert 20 < len(trace.records)  # what is left of them can have been recorded
    perfetto.write(tmp_path / "json", trace)
    sqlite.write(tmp_path / "database", trace)


@pytest.mark.parametrize(
    "facts",
    [b"[]", b"1", b"NaN", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 6000, b'{"\\ud800": 1e999}', b"\xff"],
)
def test_hostile_facts(tmp_path: Path, facts: bytes) -> None:
    head = FILE_HEADER.pack(MAGIC, VERSION, 2, crc32(b"{}")) + b"{}"
    content = head.ljust(aligned(len(head)), b"\0") + sealed_chunk(Chunk.FACTS, facts)
    assert isinstance(check(reader.read, tmp_path / "x", content), Trace)
