"""Recordings for tests: two small ones that lie here, the others where they are, and edits of them."""

from __future__ import annotations

import json
import lzma
import pickle
from pathlib import Path
from typing import Any

from recordings import HERE


def plain(name: str) -> dict[str, Any]:
    """Return a recording's content; these two files are ours and trusted."""
    data: dict[str, Any] = pickle.loads(lzma.decompress((HERE / f"{name}.pickle.xz").read_bytes()))
    return data


def stats_of(recording: Path) -> dict[str, int]:
    """Return PyTorch's own statistics at the end of a recording."""
    name = recording.name.removesuffix(".pickle.xz")
    stats: dict[str, int] = json.loads((recording.parent / f"{name}.stats.json").read_text())["stats"]
    return stats


def dump(data: Any, path: Path, protocol: int = 4) -> Path:
    """Write `data` as a pickle and return its path."""
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    return path


def event(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    """Return an entry of a device's trace."""
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def segment(address: int, total_size: int, *blocks: tuple[int, str], **more: Any) -> dict[str, Any]:
    """Return a segment of the final state, its blocks given as (size, state)."""
    filled, here = [], address
    for size, state in blocks:
        filled.append({"address": here, "size": size, "requested_size": size, "state": state, "frames": []})
        here += size
    active = sum(size for size, state in blocks if state != "inactive")
    plain = {"device": 0, "address": address, "total_size": total_size, "stream": 0, "segment_type": "large"}
    return {**plain, "active_size": active, "segment_pool_id": (0, 0), "is_expandable": False, "blocks": filled, **more}
