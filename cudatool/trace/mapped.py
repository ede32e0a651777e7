"""The runs of pages that expandable segments mapped, from when to when."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import Kind

__all__ = ["Run", "mapped_runs"]


class Run(NamedTuple):
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


def mapped_runs(records: npt.NDArray[np.void]) -> list[Run]:
    """Return the runs of mapped pages, by start and address. An unmap may cut a run in two, or take parts of several.

    No page is mapped twice at a time: where the unmap was not recorded, the next map ends what was there. The work is
    therefore that of sorting, whatever the events say.
    """
    index = np.flatnonzero(np.isin(records["kind"], (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)))
    own = records[index]
    columns: list[list[Any]] = [own[name].astype(np.int64).tolist() for name in ("kind", "device", "address", "size")]
    begins: defaultdict[int, list[int]] = defaultdict(list)  # of the runs of a device, sorted
    runs: dict[tuple[int, int], tuple[int, int]] = {}  # (device, address) -> (end address, record of the map)
    found = []
    for i, kind, device, begin, size in zip(index.tolist(), *columns, strict=True):
        stop, here = begin + size, begins[device]
        if begin >= stop:
            continue
        low, high = bisect_right(here, begin), bisect_left(here, stop)
        if low and runs[device, here[low - 1]][0] > begin:
            low -= 1
        kept = []
        for address in here[low:high]:
            run_stop, mapped = runs.pop((device, address))
            first, last = max(address, begin), min(run_stop, stop)
            if first < last:
                found.append(Run(mapped, first, last - first, i))
            if address < begin:
                runs[device, address] = (begin, mapped)
                kept.append(address)
            if stop < run_stop:
                runs[device, stop] = (run_stop, mapped)
                kept.append(stop)
        if kind == Kind.SEGMENT_MAP:
            runs[device, begin] = (stop, i)
            kept.append(begin)
        here[low:high] = sorted(kept)
    never = len(records)
    found += [Run(mapped, address, stop - address, never) for (_, address), (stop, mapped) in runs.items()]
    return sorted(found)
