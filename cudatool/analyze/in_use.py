"""The bytes that blocks in use need, wherever they are: a lower bound of reserved bytes under any settings."""

from __future__ import annotations

import numpy as np

from cudatool.analyze.requests import Requests
from cudatool.memory.blocks import round_size
from cudatool.memory.settings import Settings

__all__ = ["InUse"]

_AT_ONCE = 1 << 16


class InUse:
    """The most that the blocks of some requests need at a time, under any settings, without a replay."""

    def __init__(self, asked: Requests) -> None:
        self._is_malloc, self._blocks, sizes = asked.calls.in_use()
        freed = set(asked.prior_pending)
        prior = [
            0 if call.block in freed else min(call.size, size)
            for call, size in zip(asked.prior_blocks, asked.prior_sizes, strict=True)
        ]
        self._begins_with = sum(prior)
        # By the number of a block the place of its size: first 0, for one that no call allocates, then those of
        # before, then those that the settings round.
        self._fixed = [0, *prior]
        self._sizes, which = np.unique(sizes, return_inverse=True)
        self._size_of = np.zeros(asked.blocks, np.int32)
        self._size_of[self._blocks[self._is_malloc]] = which + len(self._fixed)
        self._size_of[[call.block for call in asked.prior_blocks]] = range(1, len(self._fixed))

    def most(self, settings: Settings) -> int:
        """Return the most bytes at a time, each block as large as the settings make it.

        The result may be too low, never too high: a block that was freed while another stream used it counts as free,
        and one that was there before the recording has the bytes that were asked for, if they are known.
        """
        size = np.array([*self._fixed, *(round_size(int(size), settings) for size in self._sizes)], np.int64)
        level = most = self._begins_with
        for first in range(0, len(self._blocks), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            change = size[self._size_of[self._blocks[part]]]
            np.negative(change, out=change, where=~self._is_malloc[part])
            levels = level + np.cumsum(change)
            most, level = max(most, int(levels.max())), int(levels[-1])
        return most
