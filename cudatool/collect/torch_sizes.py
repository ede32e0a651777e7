"""From requests to the sizes of blocks, which PyTorch's memory snapshots leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect.torch_model import BLOCK_KINDS, MAX_SIZE, SEGMENT_KINDS
from cudatool.trace import _sweep

__all__ = ["add_unsplit_tails", "round_sizes"]

_MIN_BLOCK: Final = 512
_LARGE_REMAINDER: Final = 1 << 20  # small requests are up to this, and large blocks are split if more than this remains

# How _sweep.add_tails() calls what a record says.
_PARTS_IN_TAILS: Final = np.zeros(256, np.uint8)
_PARTS_IN_TAILS[[*BLOCK_KINDS, *SEGMENT_KINDS]] = 1, 2, 3, 4, 5


def round_sizes(size: npt.NDArray[np.uint64], settings: Mapping[str, Any]) -> npt.NDArray[np.uint64]:
    """Return the block sizes that requests of `size` bytes are rounded to, as c10's ``round_size`` has it."""
    rounded: npt.NDArray[np.uint64] = np.maximum(
        (size + np.uint64(_MIN_BLOCK - 1)) // np.uint64(_MIN_BLOCK), 1
    ) * np.uint64(_MIN_BLOCK)
    divisions_by_class = settings.get("roundup_power2_divisions") or {}
    if not any(divisions_by_class.values()):
        return rounded
    table = [0] * 16  # by the power of two of MiB: below 2 MiB, below 4 MiB, ... 32 GiB and more
    for mebibytes, divisions in divisions_by_class.items():
        table[min(max(int(mebibytes).bit_length() - 1, 0), 15)] = int(divisions)
    safe = np.maximum(size, 1)
    floor_log2 = np.frexp(safe.astype(np.float64))[1].astype(np.int64) - 1  # sizes are below 2**48: exact
    divisions = np.array(table, np.uint64)[np.clip(floor_log2 - 20, 0, 15)]
    applies = (divisions > 1) & (size > np.uint64(_MIN_BLOCK) * divisions)
    power = np.uint64(1) << floor_log2.astype(np.uint64)
    step = power // np.maximum(divisions, 1)
    result: npt.NDArray[np.uint64] = np.where(
        applies, (size + step - np.uint64(1)) // np.maximum(step, 1) * step, rounded
    )
    return result


def add_unsplit_tails(records: npt.NDArray[np.void], settings: Mapping[str, Any]) -> None:
    """Correct the sizes of large blocks that were handed out whole because what was left over was too small.

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
