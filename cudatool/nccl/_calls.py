"""What a rank asks for in a collective operation, and which requests make sense."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import ml_dtypes
import numpy as np

from cudatool.errors import UsageError
from cudatool.runtime.allocator import Layout
from cudatool.runtime.extents import Extent, extents
from cudatool.runtime.stream import Stream
from cudatool.trace.events import AccessFlag

__all__ = ["AVG", "DTYPES", "MAX", "MIN", "PAIRED", "PROD", "SUM", "Name", "RankPart", "wire"]

SUM, PROD, MAX, MIN, AVG = range(5)
"""ncclRedOp_t"""

DTYPES: Final[dict[np.dtype[Any], int]] = {
    # ncclDataType_t
    np.dtype(np.int8): 0,
    np.dtype(np.uint8): 1,
    np.dtype(np.int32): 2,
    np.dtype(np.uint32): 3,
    np.dtype(np.int64): 4,
    np.dtype(np.uint64): 5,
    np.dtype(np.float16): 6,
    np.dtype(np.float32): 7,
    np.dtype(np.float64): 8,
    np.dtype(ml_dtypes.bfloat16): 9,
    np.dtype(ml_dtypes.float8_e4m3fn): 10,
    np.dtype(ml_dtypes.float8_e5m2): 11,
}


class Name(StrEnum):
    """The operations."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    SEND = "send"
    RECV = "recv"


PAIRED: Final = (Name.SEND, Name.RECV)
"""What two ranks do; in the other operations all take part."""

_REDUCING: Final = (Name.ALL_REDUCE, Name.REDUCE, Name.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """The part of one rank in an operation.

    Attributes
    ----------
    name
        Which operation.
    sent, received
        Contiguous memory of the rank's device, None where the rank gives or gets nothing.
    rank, peer
        The caller's, and the root's (reduce, broadcast) or the other one's (send, recv), else 0.
    op
        :data:`SUM` and the like.
    stream
        Where it is enqueued.
    """

    name: Name
    sent: Layout | None
    received: Layout | None
    rank: int
    peer: int
    op: int
    stream: Stream

    @property
    def result(self) -> Layout:
        """What is received, else what is sent."""
        found = self.sent if self.received is None else self.received
        assert found is not None
        return found

    def accesses(self) -> list[tuple[list[Extent], AccessFlag]]:
        """Return what it touches, and how."""
        sides = (self.sent, AccessFlag.READ), (self.received, AccessFlag.WRITE)
        return [(extents(layout), mode) for layout, mode in sides if layout is not None]


def wire(layout: Layout, name: Name) -> Layout:
    """Return a layout in a dtype that NCCL has: what it only moves may be of any other one, as bytes.

    Raises
    ------
    UsageError
        The elements are not contiguous, or NCCL cannot compute with them.
    """
    if not layout.flags.c_contiguous:
        raise UsageError(f"{name} takes contiguous arrays; pass array.contiguous()")
    dtype: np.dtype[Any] = layout.dtype
    if dtype in DTYPES:
        return layout
    if name not in _REDUCING or dtype == np.bool:
        return layout.reshape(-1).view(np.uint8)
    raise UsageError(f"{name} cannot compute with {dtype}; NCCL has {', '.join(map(str, DTYPES))}")
