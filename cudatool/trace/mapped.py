"""The runs of pages that expandable segments mapped, from when to when."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import Kind

__all__ = ["MappedPages", "PageRun", "mapped_runs"]


class PageRun(NamedTuple):
    """Pages that one event mapped and one event unmapped.

    Attributes
    ----------
    start
        The record that mapped them.
    address, size
        In bytes.
    end
        The record that unmapped them, or that mapped them again; the number of records where none did.
    """

    start: int
    address: int
    size: int
    end: int


class MappedPages:
    """What is mapped now. No page is mapped twice at a time: a map of what is mapped ends that first.

    The work is that of sorting, whatever is said.
    """

    def __init__(self) -> None:
        self._begins: defaultdict[int, list[int]] = defaultdict(list)  # of the runs of a device, sorted
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}  # (device, address) -> (end address, record of the map)

    def change(self, device: int, begin: int, size: int, record: int, *, maps: bool) -> list[PageRun]:
        """Map pages, or unmap them; return the runs that end with `record`."""
        stop, here, runs = begin + size, self._begins[device], self._runs
        ended: list[PageRun] = []
        if begin >= stop:
            return ended
        low, high = bisect_right(here, begin), bisect_left(here, stop)
        if low and runs[device, here[low - 1]][0] > begin:
            low -= 1
        kept = []
        for address in here[low:high]:
            run_stop, mapped = runs.pop((device, address))
            first, last = max(address, begin), min(run_stop, stop)
            if first < last:
                ended.append(PageRun(mapped, first, last - first, record))
            if address < begin:
                runs[device, address] = (begin, mapped)
                kept.append(address)
            if stop < run_stop:
                runs[device, stop] = (run_stop, mapped)
                kept.append(stop)
        if maps:
            runs[device, begin] = (stop, record)
            kept.append(begin)
        here[low:high] = sorted(kept)
        return ended

    def mapped(self, never: int) -> list[PageRun]:
        """Return the runs that have not ended, with `never` as their end."""
        return [PageRun(mapped, address, stop - address, never) for (_, address), (stop, mapped) in self._runs.items()]


def mapped_runs(records: npt.NDArray[np.void]) -> list[PageRun]:
    """Return the runs of mapped pages, by start and address. An unmap may cut a run in two, or take parts of several.

    Where an unmap was not recorded, the next map ends what was there.
    """
    index = np.flatnonzero(np.isin(records["kind"], (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)))
    own = records[index]
    columns: list[list[Any]] = [own[name].astype(np.int64).tolist() for name in ("kind", "device", "address", "size")]
    pages, found = MappedPages(), []
    for i, kind, device, begin, size in zip(index.tolist(), *columns, strict=True):
        found += pages.change(device, begin, size, i, maps=kind == Kind.SEGMENT_MAP)
    return sorted(found + pages.mapped(len(records)))
