"""The numbers of reports and exports, against lists and loops over the events of random traces.

Half of the traces are damaged: events are missing, doubled or elsewhere. Both devices use the same addresses.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudatool import analyze
from cudatool.export import perfetto, sqlite
from cudatool.fleet.tables import NULL, Tables
from cudatool.trace.events import OF_MODULE, RECORD, Kind, pack_pool
from cudatool.trace.model import Frame, Trace

MIB = 1 << 20
PAGE = 2 * MIB
NAMES = ["", "cuMemAlloc", "Net.layers.0", "Net.head"]
FRAMES = [Frame("train.py", "main", 1), Frame("train.py", "step", 5), Frame("model.py", "layer", 7)]
STACKS = [(), (0,), (1, 0), (2, 1, 0)]
POOLS = (0, 0, pack_pool((1, 0)))
BIRTHS = (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC)
FREES = (Kind.BLOCK_FREE_REQUESTED, Kind.MEM_FREE)
ENDS = (Kind.BLOCK_FREE_COMPLETED, Kind.MEM_FREE)

Row = dict[str, Any]


def random_trace(seed: int) -> Trace:
    """Return allocations, frees (some of nothing), segments, mapped pages and failures on one or two devices."""
    draw = random.Random(seed)
    rows: list[Row] = []
    segments: list[Row] = []
    live: list[Row] = []
    taken: list[Row] = []
    begin = [1 << 40, 1 << 40]
    kinds = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE, Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP, Kind.MEM_ALLOC, Kind.MEM_FREE)
    kinds += (Kind.OOM, *(Kind.BLOCK_ALLOC,) * 8, *(Kind.BLOCK_FREE_REQUESTED,) * 6, Kind.BLOCK_FREE_COMPLETED)
    for _ in range(draw.choice((5, 40, 120))):
        kind, device = draw.choice(kinds), draw.randrange(2) if seed % 2 else 0
        row: Row = {"kind": kind, "device": device, "stack": draw.randrange(4), "stream": draw.randrange(3)}
        if kind == Kind.SEGMENT_ALLOC:
            row |= {"address": begin[device], "size": draw.choice((2, 20)) * MIB, "aux1": draw.choice(POOLS)}
            begin[device] += row["size"]
            segments.append(row)
        elif kind in (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP):
            row |= {"address": (1 << 42) + PAGE * draw.randrange(30), "size": PAGE * draw.randrange(1, 6), "stream": 0}
        elif kind == Kind.MEM_ALLOC:
            row |= {"address": (1 << 43) + PAGE * draw.randrange(20), "size": 512 * draw.randrange(1, 4096), "name": 1}
            taken.append(row)
        elif kind == Kind.BLOCK_ALLOC:
            place = draw.choice(segments) if segments else {"address": 1 << 44, "size": MIB, "aux1": 0}
            size = 512 * draw.randrange(1, 2048)
            row |= {"address": place["address"] + 512 * draw.randrange(place["size"] // 512), "size": size}
            row |= {"aux0": size - draw.randrange(512), "aux1": place["aux1"], "device": place.get("device", device)}
            if draw.random() < 0.4:
                row |= {"flags": OF_MODULE, "name": draw.choice((2, 3))}
            live.append(row)
        elif kind == Kind.OOM:
            row |= {"size": MIB, "aux0": draw.randrange(MIB)}
        else:  # what is freed, or of something that is not there
            known = {Kind.SEGMENT_FREE: segments, Kind.MEM_FREE: taken}.get(kind, live)
            row |= {"address": 1 << 45, "size": 512} | (draw.choice(known) if known and draw.random() < 0.9 else {})
            row |= {"kind": kind, "flags": 0, "name": 0}
        rows.append(row)
        if kind == Kind.BLOCK_FREE_REQUESTED and draw.random() < 0.8:
            rows.append({**row, "kind": Kind.BLOCK_FREE_COMPLETED})
    for _ in range(draw.randrange(8) if seed % 4 < 2 else 0):
        one, other = draw.randrange(len(rows)), draw.randrange(len(rows))
        damage = draw.choice(("double", "lose", "move"))
        if damage == "double":
            rows.insert(one, dict(rows[other]))
        elif damage == "move":
            rows.insert(one, rows.pop(other))
        elif len(rows) > 2:
            del rows[one]
    records = np.zeros(len(rows), RECORD)
    for i, row in enumerate(rows):
        records["time"][i] = 1000 + 10 * i
        for name, value in row.items():
            records[name][i] = value
    return Trace(records, NAMES, STACKS, FRAMES, source="random.ctrace")


def rows_of(trace: Trace) -> list[Row]:
    names = [name for name in RECORD.names or () if name != "reserved"]
    return [{name: int(record[name]) for name in names} for record in trace.records]


def lived(rows: list[Row], births: tuple[int, ...], frees: tuple[int, ...], ends: tuple[int, ...]) -> list[Row]:
    """Return what was born, with the numbers of the events at which it was, was freed, and ended."""
    found = []
    for i, row in enumerate(rows):
        if row["kind"] in births:
            here = [
                j for j in range(i + 1, len(rows)) if all(rows[j][key] == row[key] for key in ("device", "address"))
            ]
            again = next((j for j in here if rows[j]["kind"] in births), len(rows))
            freed = next((j for j in here if j < again and rows[j]["kind"] in frees), None)
            end = next((j for j in here if j < again and rows[j]["kind"] in ends), again)
            freed = end if freed is None else freed
            requested = row["aux0"] if row["kind"] == Kind.BLOCK_ALLOC else row["size"]
            found.append({**row, "start": i, "freed": min(freed, end), "end": end, "requested": requested})
    return found


def mapped(rows: list[Row]) -> list[Row]:
    """Return each page from when it was mapped to when it was unmapped, or mapped again."""
    found, since = [], dict[tuple[int, int], int]()

    def add(device: int, page: int, start: int, end: int) -> None:
        found.append({**rows[start], "device": device, "address": page, "size": PAGE, "start": start, "end": end})

    for i, row in enumerate(rows):
        if row["kind"] in (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP):
            for page in range(row["address"], row["address"] + row["size"], PAGE):
                if (start := since.pop((row["device"], page), None)) is not None:
                    add(row["device"], page, start, i)
                if row["kind"] == Kind.SEGMENT_MAP:
                    since[row["device"], page] = i
    for (device, page), start in since.items():
        add(device, page, start, len(rows))
    return found


def total(lives: list[Row], index: int, until: str = "end", what: str = "size") -> int:
    return sum(life[what] for life in lives if life["start"] <= index < life[until])


class Truth:
    """What the events of one device say."""

    def __init__(self, rows: list[Row], blocks: list[Row], reserved: list[Row], device: int) -> None:
        self.blocks = [block for block in blocks if block["device"] == device]
        self.reserved = [one for one in reserved if one["device"] == device]
        edges = {block[key] for block in self.blocks for key in ("start", "freed", "end")}
        edges |= {one[key] for one in self.reserved for key in ("start", "end")}
        self.changes = sorted(edge for edge in edges if edge < len(rows))
        self.active = [total(self.blocks, i) for i in self.changes]
        self.allocated = [total(self.blocks, i, "freed") for i in self.changes]
        self.taken = [total(self.reserved, i) for i in self.changes]
        self.peak = self.changes[self.active.index(max(self.active))] if self.changes else -1
        self.ooms = sum(row["kind"] == Kind.OOM and row["device"] == device for row in rows)
        self.never = len(rows)

    def most(self, lives: list[Row]) -> int:
        return max((total(lives, i) for i in self.changes), default=0)

    def sites(self, chosen: Callable[[Row], bool]) -> list[tuple[int, int, int, int]]:
        sums: dict[tuple[int, int], list[int]] = {}
        for block in filter(chosen, self.blocks):
            of_site = sums.setdefault((block["stack"], 0 if block["stack"] else block["requested"]), [0, 0, 0])
            for i, more in enumerate((block["size"], 1, block["requested"])):
                of_site[i] += more
        return sorted((stack, *values) for (stack, _), values in sums.items())


def truths(trace: Trace) -> Iterator[tuple[int, Truth]]:
    rows = rows_of(trace)
    blocks = lived(rows, BIRTHS, FREES, ENDS)
    ends = (Kind.SEGMENT_FREE, Kind.MEM_FREE)
    reserved = [*lived(rows, (Kind.SEGMENT_ALLOC, Kind.MEM_ALLOC), ends, ends), *mapped(rows)]
    failed = [row for row in rows if row["kind"] == Kind.OOM]
    for device in sorted({row["device"] for row in (*blocks, *reserved, *failed)}):
        yield device, Truth(rows, blocks, reserved, device)


@pytest.mark.some_of("seed", range(40), 12)
def test_a_report_says_what_the_events_say(seed: int) -> None:
    trace = random_trace(seed)
    plain = analyze.report(trace).as_dict()
    expected = dict(truths(trace))
    assert list(expected) == [found["device"] for found in plain["devices"]]
    for truth, found in zip(expected.values(), plain["devices"], strict=True):
        knows = any(truth.taken) or not any(truth.active)
        most = [max(column, default=0) for column in (truth.active, truth.allocated, truth.taken)]
        assert most == [found["peak_active"], found["peak_allocated"], found["peak_reserved"] if knows else most[2]]
        assert (len(truth.blocks), truth.ooms) == (found["allocations"], found["ooms"])
        for moment, index in (("peak", truth.peak), ("now", truth.changes[-1] if truth.changes else -1)):
            levels = [total(truth.blocks, index, *what) for what in ((), ("freed",), ("freed", "requested"))]
            said = [found[moment][name] for name in ("active", "allocated", "requested")]
            assert [index, *levels] == [found[moment]["index"], *said]
        for name, sites in (
            ("at_peak", truth.sites(lambda block, at=truth.peak: block["start"] <= at < block["end"])),
            ("still_live", truth.sites(lambda block, never=truth.never: block["freed"] == never)),
        ):
            said = [tuple(site[key] for key in ("stack", "size", "count", "requested")) for site in found[name]]
            assert sites == sorted(said)
        diagnosis = found["diagnosis"]
        for by, key in (("by_stream", "stream"), ("by_pool", "aux1")):
            usages = []
            for value in sorted({one[key] for one in (*truth.blocks, *truth.reserved)}):
                own = [block for block in truth.blocks if block[key] == value]
                taken = [one for one in truth.reserved if one[key] == value]
                levels = [total(own, truth.peak), truth.most(own), total(taken, truth.peak), truth.most(taken)]
                usages.append((value, *levels[: 4 if truth.reserved else 2]))
            names = ("id", "at_peak", "peak", "reserved_at_peak", "reserved_peak")[: 5 if truth.reserved else 3]
            assert usages == sorted(tuple(usage[name] for name in names) for usage in diagnosis[by])
        assert most[0] == sum(share["size"] for share in diagnosis["categories"]["at_peak"])
        assert most[0] == diagnosis["tree"]["total_size"][0] == sum(diagnosis["tree"]["self_size"])
        if diagnosis["modules"] is not None:
            live = [block for block in truth.blocks if block["start"] <= truth.peak < block["end"]]
            held = {name: sum(b["size"] for b in live if b["flags"] and NAMES[b["name"]] == name) for name in NAMES[2:]}
            said = {f"Net.{row['path']}": row["size"] for row in diagnosis["modules"]["held"]}
            assert {name: size for name, size in held.items() if size} == said


@pytest.mark.some_of("seed", range(40), 12)
def test_exports_say_what_the_events_say(seed: int, tmp_path: Path) -> None:
    trace = random_trace(seed)
    sqlite.write(tmp_path / "x.sqlite", trace)
    perfetto.write(tmp_path / "x.json", trace)
    database = sqlite3.connect(tmp_path / "x.sqlite")
    drawn = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    ranks = Tables(trace).ranks
    never = len(trace.records)
    for device, truth in truths(trace):
        keys = ("address", "size", "requested", "stack", "start", "freed", "end")
        blocks = [tuple(block[key] for key in keys) for block in truth.blocks]
        said = database.execute(
            "SELECT address, size, requested, stack, alloc_event, ifnull(free_requested_event, ?), "
            "ifnull(free_completed_event, ?) FROM allocations WHERE device = ? ORDER BY alloc_event",
            (never, never, device),
        )
        assert blocks == said.fetchall()
        at_peak = database.execute("SELECT sum(peak_bytes) FROM by_call_site WHERE device = ?", (device,)).fetchone()[0]
        assert max(truth.active, default=0) == (at_peak or 0)
        counters = [event["args"] for event in drawn if event["ph"] == "C" and event["pid"] == 1000 + device]
        assert truth.active == [levels["active"] for levels in counters]
        assert truth.allocated == [levels["allocated"] for levels in counters]
        row = ranks["device"].tolist().index(device)
        names = ("allocations", "peak_active", "peak_allocated", "peak_reserved", "ooms")
        most = [max(column, default=0) for column in (truth.active, truth.allocated, truth.taken)]
        found = [int(ranks[name][row]) for name in names]
        if found[3] == NULL:  # nothing was reserved, so it is not known
            assert most[2] == 0 < most[0]
            found[3] = 0
        assert [len(truth.blocks), *most, truth.ooms] == found
    database.close()
