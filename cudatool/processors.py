"""How many processors of this machine the process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from math import ceil
from pathlib import Path

__all__ = ["processors"]


@cache
def processors() -> int:
    """Return the processors that the process may run on or, if that is less, those that its control groups allow.

    A container with ``docker run --cpus 2`` or a Kubernetes limit sees all processors of its machine. More threads than
    it has time for wait for each other.
    """
    return min(len(os.sched_getaffinity(0)), _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")) or 1 << 30)


def _quota(groups: Path, mounted: Path) -> int | None:
    """Return the time that control groups allow, in processors, rounded up; None if they do not limit it.

    Of cgroup v2 it is in ``cpu.max``, of v1 in ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` (Linux, "CFS Bandwidth
    Control" and "Control Group v2"). Each group limits those below it, too. Of a container the path is mostly that
    outside of it: then its own group is the one that is mounted.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    found = [limit for line in lines for limit in _limits(line, mounted)]
    return max(1, ceil(min(found))) if found else None


def _limits(line: str, mounted: Path) -> Iterator[float]:
    """Yield the limits of a group, and of those above it, in processors."""
    hierarchy, controllers, path = line.split(":", 2)
    if hierarchy == "0":
        top = mounted
    elif "cpu" in controllers.split(","):
        top = mounted / "cpu"  # also where it is mounted together with others
    else:
        return
    place = Path(path.lstrip("/"))
    for group in (place, *place.parents):
        try:
            if hierarchy == "0":
                quota, period = (top / group / "cpu.max").read_text().split()
            else:
                quota = (top / group / "cpu.cfs_quota_us").read_text()
                period = (top / group / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # there is none
            continue
