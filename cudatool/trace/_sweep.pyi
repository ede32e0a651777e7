"""What _sweep.c offers. Arrays are contiguous; ValueError says that they do not fit together."""

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]

def pair(
    roles: npt.NDArray[np.uint8],
    addresses: npt.NDArray[np.uint64],
    devices: npt.NDArray[np.int8],
    starts: _Ints,
    freed: _Ints,
    ends: _Ints,
    /,
) -> None:
    """Join each birth with the first free, and the first end, of its address that come before its next birth.

    `roles` are sums of 1 (born), 2 (freed) and 4 (ended). The last three arrays, with an element for each birth, are
    given positions. Where no end came, the next birth of the address is the end, else the number of events.
    """

def overlaps(events: _Ints, ranks: _Ints, addresses: _Ints, sizes: _Ints, /) -> tuple[int, int]:
    """Return how many rows are born where another is, and the position of the first such event (-1 for none).

    Events are numbers of rows that are born, or ``~number`` of those that die; `ranks` those of the rows' addresses.
    """

def add_tails(
    what: npt.NDArray[np.uint8], ranks: _Ints, addresses: _Ints, sizes: _Ints, limit: int, remainder: int, /
) -> None:
    """Add to the sizes of blocks the free bytes that follow them, where these are too few to be split off.

    `what` is 1 for a block, 2 and 3 for its free (requested, completed), 4 for a segment, 5 for its free.
    """
