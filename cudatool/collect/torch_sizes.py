"""Derives the sizes of blocks, which PyTorch's memory snapshots leave out, from the requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect.torch_model import BLOCK_KINDS, MAX_SIZE, SEGMENT_KINDS
from cudatool.memory.blocks import SMALL_LIMIT
from cudatool.trace import _sweep

__all__ = ["add_unsplit_tails"]

_LARGE_REMAINDER: Final = SMALL_LIMIT  # large blocks are split if more than this remains

# Codes of record kinds in _sweep.add_tails().
_PARTS_IN_TAILS: Final = np.zeros(256, np.uint8)
_PARTS_IN_TAILS[[*BLOCK_KINDS, *SEGMENT_KINDS]] = 1, 2, 3, 4, 5


def add_unsplit_tails(records: npt.NDArray[np.void], settings: Mapping[str, Any]) -> None:
    """Correct the sizes of large blocks that were not split because the remainder was too small.

    A snapshot records only what was requested. But free neighbours are always merged, so the free block that an
    address was taken from reached up to the next live block or the segment's end; PyTorch splits it only if more
    than 1 MiB remains and the request is below ``max_split_size``. (Small and expandable segments always split.)
    """
    limit = settings.get("max_split_size") or -1
    limit = limit if limit > 0 else MAX_SIZE
    kind = records["kind"]
    blocks = np.isin(kind, BLOCK_KINDS) & (records["size"] > _LARGE_REMAINDER)
    index = np.flatnonzero(blocks | (np.isin(kind, SEGMENT_KINDS) & (records["flags"] == 0)))
    what = _PARTS_IN_TAILS[kind[index]]
    addresses = records["address"][index].astype(np.int64)
    sizes = records["size"][index].astype(np.int64)
    _, ranks = np.unique(addresses, return_inverse=True)
    _sweep.add_tails(what, ranks.reshape(-1).astype(np.int64, copy=False), addresses, sizes, limit, _LARGE_REMAINDER)
    records["size"][index] = sizes
