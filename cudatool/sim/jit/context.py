"""What native code and Python share: the record that every call of native code gets."""

from __future__ import annotations

import ctypes

__all__ = ["EXIT", "MAX_THREADS", "Context", "Stop"]

MAX_THREADS = 1024  # of a block
EXIT = 0x7FFFFFFF  # the region number of a thread that has ended


class Stop:
    """Why native code stopped early: values of :attr:`Context.status`."""

    NONE = 0
    TRAP = 1
    DEADLOCK = 2
    ASSERT = 3


class Context(ctypes.Structure):
    """One worker's view of a launch. Generated code reads these fields by offset; a change here changes the code's key.

    Attributes
    ----------
    order_multiplier, order_offset
        Block number ``i`` in execution order is block ``(i * multiplier + offset) mod blocks``.
    next_block
        Address of the counter that the workers of a launch share: the next block that nobody has taken.
    slots
        Where the threads of the block keep what they need after a suspension.
    shadow_read, shadow_write, shadow_atomic, shadow_pages
        Footprint maps, biased so that byte ``arena_base`` is at index 0 (:mod:`.footprint`).
    status, site, at_*
        Why and where execution stopped; `site` is a line of the PTX.
    """

    _fields_ = (
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("grid_z", ctypes.c_uint32),
        ("block_x", ctypes.c_uint32),
        ("block_y", ctypes.c_uint32),
        ("block_z", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("dynamic_shared", ctypes.c_uint32),
        ("blocks", ctypes.c_uint64),
        ("chunk", ctypes.c_uint64),
        ("order_multiplier", ctypes.c_uint64),
        ("order_offset", ctypes.c_uint64),
        ("next_block", ctypes.c_uint64),
        ("params", ctypes.c_uint64),
        ("globals", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("local", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("arena_base", ctypes.c_uint64),
        ("arena_bytes", ctypes.c_uint64),
        ("shadow_read", ctypes.c_uint64),
        ("shadow_write", ctypes.c_uint64),
        ("shadow_atomic", ctypes.c_uint64),
        ("shadow_pages", ctypes.c_uint64),
        ("status", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("at_x", ctypes.c_uint32),
        ("at_y", ctypes.c_uint32),
        ("at_z", ctypes.c_uint32),
        ("at_thread", ctypes.c_uint32),
        ("assert_message", ctypes.c_uint64),
        ("assert_file", ctypes.c_uint64),
        ("assert_function", ctypes.c_uint64),
        ("assert_line", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("zero", ctypes.c_uint64),
    )
