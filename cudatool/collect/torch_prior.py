"""What a snapshot shows of the memory that was there before its ring of events began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect.torch_model import MAP_KINDS, is_live
from cudatool.collect.torch_tables import SnapshotTables
from cudatool.limits import PAGES
from cudatool.memory.blocks import SMALL_PAGE
from cudatool.trace.events import RECORD, Kind, join_records

__all__ = ["PriorState"]

_PAGES_OF_RANGE: Final = 64  # for each range, as events of small ones may be many

_Ints = npt.NDArray[np.int64]


class PriorState:
    """Infers what existed before the events of a device, from them and from the final state.

    Parameters
    ----------
    tables
        What its records point into.
    """

    def __init__(self, tables: SnapshotTables) -> None:
        self._tables = tables
        self._pages_left = PAGES  # of all devices' expandable segments, for a file that a stranger may have made

    def records(
        self, events: npt.NDArray[np.void], segments: list[dict[str, Any]], device: int
    ) -> npt.NDArray[np.void]:
        """Return records that allocate what existed before the ring began.

        That is what is freed before it is allocated, and what exists at the end without an event.
        """
        whole = {s["address"]: s for s in segments if not s.get("is_expandable")}
        live = {b["address"]: (s, b) for s in segments for b in s["blocks"] if is_live(b)}
        freed, kept = _prior(events, Kind.SEGMENT_ALLOC, (Kind.SEGMENT_FREE,), whole)
        segments_freed = _as_kind(Kind.SEGMENT_ALLOC, events[freed])
        segments_kept = [self._row(Kind.SEGMENT_ALLOC, device, whole[address]) for address in kept]

        freed, kept = _prior(events, Kind.BLOCK_ALLOC, (Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED), live)
        blocks_freed = events[freed]
        waiting = blocks_freed[blocks_freed["kind"] == Kind.BLOCK_FREE_COMPLETED]
        blocks_kept = [self._row(Kind.BLOCK_ALLOC, device, *live[address]) for address in kept]
        allocs = join_records([_as_kind(Kind.BLOCK_ALLOC, blocks_freed), np.array(blocks_kept, RECORD)])
        allocs = allocs[np.argsort(allocs["address"])[::-1]]  # each after what limits it: see add_unsplit_tails
        pending = [
            self._row(Kind.BLOCK_FREE_REQUESTED, device, *live[address])
            for address in kept
            if live[address][1]["state"] == "active_pending_free"
        ]
        records = join_records(
            [
                segments_freed,
                np.array(segments_kept, RECORD),
                self._mapped(events, segments, device),
                allocs,
                _as_kind(Kind.BLOCK_FREE_REQUESTED, waiting),
                np.array(pending, RECORD),
            ]
        )
        records["time"] = events["time"][0] if len(events) else 0
        return records

    def _mapped(
        self, events: npt.NDArray[np.void], segments: list[dict[str, Any]], device: int
    ) -> npt.NDArray[np.void]:
        """Return records that map what was mapped of expandable segments before the ring began."""
        expandable = [s for s in segments if s.get("is_expandable")]
        changes = events[np.isin(events["kind"], MAP_KINDS)]
        page, change = self._pages(changes["address"], changes["size"])
        paged = changes[change]
        paged["address"] = page
        page, owner = self._pages([s["address"] for s in expandable], [s["total_size"] for s in expandable])
        rows = np.array([self._row(Kind.SEGMENT_MAP, device, segment) for segment in expandable], RECORD)
        index, born = _first_events(paged, Kind.SEGMENT_MAP, (Kind.SEGMENT_UNMAP,))
        kept = np.flatnonzero(~np.isin(page, paged["address"][index]))
        at_end = rows[owner[kept]]
        at_end["address"] = page[kept]
        pages = join_records([_as_kind(Kind.SEGMENT_MAP, paged[np.sort(index[~born])]), at_end])
        pages = pages[np.argsort(pages["address"])]
        # Join neighbours that differ in nothing but their address.
        joined = np.diff(pages["address"]) == 1
        for column in ("stream", "aux1", "flags"):
            joined &= pages[column][1:] == pages[column][:-1]
        begin = np.flatnonzero(~np.concatenate([np.zeros(min(len(pages), 1), np.bool_), joined]))
        runs = pages[begin]
        runs["size"] = np.diff(np.append(begin, len(pages))) * SMALL_PAGE
        runs["address"] *= SMALL_PAGE
        return runs

    def _pages(self, address: npt.ArrayLike, size: npt.ArrayLike) -> tuple[_Ints, _Ints]:
        """Return the number of every 2 MiB page in the ranges, and which range each belongs to."""
        begin = np.asarray(address, np.int64) // SMALL_PAGE
        count = -(-np.asarray(size, np.int64) // SMALL_PAGE)
        self._pages_left -= int(count.sum()) - _PAGES_OF_RANGE * len(count)
        if self._pages_left < 0:
            raise ValueError("more memory mapped than any GPU has")
        owner = np.repeat(np.arange(len(count)), count)
        return begin[owner] + np.arange(len(owner)) - (np.cumsum(count) - count)[owner], owner

    def _row(
        self, kind: Kind, device: int, segment: Mapping[str, Any], block: Mapping[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Return the record of an event on a segment of the final state, or on one of its blocks."""
        what = segment if block is None else block
        record = np.zeros((), RECORD)
        record["kind"], record["device"], record["address"] = kind, device, what["address"]
        record["stream"] = self._tables.stream(device, segment.get("stream") or 0)
        record["aux1"] = self._tables.pool(segment.get("segment_pool_id") or (0, 0))
        record["stack"] = self._tables.stack(what.get("frames") or ())
        if block is None:
            record["size"], record["flags"] = segment["total_size"], segment.get("segment_type") == "small"
        else:
            record["size"], record["aux0"] = block["size"], block.get("requested_size", block["size"])
        return tuple(record.item())


def _prior(
    events: npt.NDArray[np.void], born: Kind, died: Sequence[Kind], final: Mapping[int, Any]
) -> tuple[_Ints, list[int]]:
    """Return what existed before `events`: indices of unmatched frees, and keys of `final` without any event."""
    index, is_birth = _first_events(events, born, died)
    return np.sort(index[~is_birth]), sorted(set(final) - set(events["address"][index].tolist()))


def _first_events(
    events: npt.NDArray[np.void], born: Kind, died: Sequence[Kind]
) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Return the first of `events` at each address, and whether it is an allocation."""
    index = np.flatnonzero(np.isin(events["kind"], [born, *died]))
    _, first = np.unique(events["address"][index], return_index=True)
    index = index[first]
    return index, events["kind"][index] == born


def _as_kind(kind: Kind, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return copies of records as events of another kind, whose stack and name are not known."""
    records = records.copy()
    records["kind"], records["stack"], records["name"] = kind, 0, 0
    return records
