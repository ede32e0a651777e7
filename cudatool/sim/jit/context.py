"""What native code and Python share: the record that every call of native code gets."""

from __future__ import annotations

import ctypes

__all__ = [
    "ARGUMENT_ARRAYS",
    "ARGUMENT_RANGES",
    "EXIT",
    "IN_STEP",
    "MAX_STACK",
    "MAX_THREADS",
    "PASSES",
    "ROW",
    "SHARED_STEP",
    "Context",
    "Stop",
    "array_offset",
    "block_shared_bytes",
]

MAX_THREADS = 1024  # of a block
EXIT = 0x7FFFFFFF  # the region number of a thread that has ended
IN_STEP = 4  # blocks that run each region before any runs the next one, at most (:func:`.grid.in_step`)
SHARED_STEP = 1024  # bytes: the shared memory of each of them begins at a multiple of that

MAX_STACK = 256 << 10
"""Largest stack of a thread, bytes as CU_LIMIT_STACK_SIZE counts them."""

ROW = MAX_THREADS + 32  # entries of a per-thread array: a partial warp may be read as a whole
ARGUMENT_ARRAYS = ("mask", "a", "b", "c", "result", "predicate", "arrived")


def array_offset(name: str) -> int:
    """Return where in the slots an argument or result array begins.

    Instructions with many operands use arrays ``x0``, ``x1``, ..., as many as :attr:`Suspension.extra` says.
    """
    number = len(ARGUMENT_ARRAYS) + int(name[1:]) if name not in ARGUMENT_ARRAYS else ARGUMENT_ARRAYS.index(name)
    return 4 * ROW * (1 + number)


PASSES = array_offset("arrived") + 4 * 16
"""Where in the slots stands how often the block's threads were let go on with a wait, after the counts of barriers."""


def block_shared_bytes(dynamic_offset: int, dynamic: int) -> int:
    """Return the shared memory of a block that has `dynamic` bytes of dynamic shared memory, from `dynamic_offset` on.

    Compilers widen loads to aligned 16 bytes: what lies there is a block's too, as a GPU gives it out.
    """
    return dynamic_offset + (dynamic + 15) // 16 * 16


class Stop:
    """Why native code stopped early: values of :attr:`Context.status`."""

    NONE = 0
    TRAP = 1
    DEADLOCK = 2
    ASSERT = 3
    BAD_FREE = 4
    STACK_OVERFLOW = 7
    STALLED = 5  # decided by the host: nothing but waiting happens
    TIMEOUT = 6  # decided by the host: it took too long


ARGUMENT_RANGES = 8
"""Pointers among a kernel's arguments of which a launch says what lies around them."""


class Context(ctypes.Structure):
    """One worker's view of a launch. Generated code reads these fields by offset; a change here changes the code's key.

    Attributes
    ----------
    order_multiplier, order_offset
        Block number ``i`` in execution order is block ``(i * multiplier + offset) mod blocks``.
    first_thread
        Of a block: where races are looked for, the warps from its one on run first.
    next_block
        Address of the counter that the workers of a launch share: the next block that no worker has taken.
    slots
        Where the threads of the block keep what they need after a suspension.
    in_step, shared_step, slots_step
        How many blocks run in step (:func:`.grid.in_step`), and how far the shared memory and the slots of each are
        from those of the one before.
    shadow_read, shadow_write, shadow_atomic, shadow_pages
        Footprint maps, biased so that byte ``arena_base`` is at index 0 (:mod:`.footprint`).
    shadow_valid, shadow_valid_pages, shadow_init
        What the checkers know of each byte (:mod:`.shadow`), biased in the same way.
    nowhere, nowhere_read
        Where suppressed accesses go: stores, and loads, which find zeros.
    host_ranges, host_count
        The host's memory that kernels may use (:mod:`.host_places`).
    found_counts, found_records
        Defects: a count for each of `found_lines` lines of PTX and kind, and the first of each, of which
        `found_capacity` are kept.
    race
        What looks for races (:mod:`.races`).
    written_first, written_bytes
        The device memory outside of which the launch writes nothing: an offset in the arena, and bytes.
    argument_first, argument_bytes
        For pointers among the arguments (:mod:`.argument_ranges`): the memory around each in which memcheck and
        initcheck, those of them that are on, find nothing. Both are multiples of a page; there may be no such memory.
    heap
        The heap of ``malloc`` in kernels (``cudatool_heap_create``), 0 if there is none.
    workspace
        What the blocks of a cooperative launch synchronize with, 0 for other launches.
    stack_bytes
        Of each thread, for calls that are not inlined (:mod:`cudatool.ptx.frames`).
    current, resume, parked
        The block that runs, as its number in execution order; whether to begin with that one, which was parked; whether
        it is parked when native code returns: its threads wait for other blocks.
    progress
        Counts what threads do that are not waiting (:mod:`.progress`), and calls of native code that left no block
        parked.
    rounds, most_rounds
        Counts how often threads go back to the beginning of a loop, in code that is not optimized; and after how many
        of them such code begins no more blocks.
    message
        What the first assertion that failed says (``malloc`` of the C library), else 0.
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
        ("in_step", ctypes.c_uint64),
        ("shared_step", ctypes.c_uint64),
        ("slots_step", ctypes.c_uint64),
        ("arena_base", ctypes.c_uint64),
        ("arena_bytes", ctypes.c_uint64),
        ("shadow_read", ctypes.c_uint64),
        ("shadow_write", ctypes.c_uint64),
        ("shadow_atomic", ctypes.c_uint64),
        ("shadow_pages", ctypes.c_uint64),
        ("shadow_valid", ctypes.c_uint64),
        ("shadow_valid_pages", ctypes.c_uint64),
        ("shadow_init", ctypes.c_uint64),
        ("nowhere", ctypes.c_uint64),
        ("nowhere_read", ctypes.c_uint64),
        ("host_ranges", ctypes.c_uint64),
        ("host_count", ctypes.c_uint64),
        ("found_counts", ctypes.c_uint64),
        ("found_records", ctypes.c_uint64),
        ("found_capacity", ctypes.c_uint64),
        ("race", ctypes.c_uint64),
        ("found_lines", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("at_x", ctypes.c_uint32),
        ("at_y", ctypes.c_uint32),
        ("at_z", ctypes.c_uint32),
        ("at_thread", ctypes.c_uint32),
        ("heap", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("stack_bytes", ctypes.c_uint64),
        ("current", ctypes.c_uint64),
        ("progress", ctypes.c_uint64),
        ("rounds", ctypes.c_uint64),
        ("most_rounds", ctypes.c_uint64),
        ("resume", ctypes.c_uint32),
        ("parked", ctypes.c_uint32),
        ("message", ctypes.c_uint64),
        ("first_thread", ctypes.c_uint64),
        ("zero", ctypes.c_uint64),
        ("written_first", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("argument_first", ctypes.c_uint64 * ARGUMENT_RANGES),
        ("argument_bytes", ctypes.c_uint64 * ARGUMENT_RANGES),
    )
