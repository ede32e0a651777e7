"""Who holds pinned host memory when most of it is pinned."""

from __future__ import annotations

from typing import Any

from records import BASE, MIB, alloc, stacks, trace

from cudatool import analyze
from cudatool.analyze import Holder
from cudatool.trace.events import LIVED, Kind
from cudatool.trace.model import Trace

CUBLAS = [("libcublas.so.13", "libcublas.so.13", 0), ("train.py", "step", 4)]
FRAMES = stacks([("train.py", "load", 1)], [("train.py", "keep", 2)], CUBLAS)


def taken(address: int, size: int, stack: int = 0, **more: Any) -> tuple[Kind, dict[str, Any]]:
    row = {"address": BASE + address, "size": size, "stack": stack, "name": "cuMemHostAlloc", **more}
    return Kind.HOST_ALLOC, row


def given_back(address: int) -> tuple[Kind, dict[str, Any]]:
    return Kind.HOST_FREE, {"address": BASE + address, "name": "cuMemFreeHost"}


def block(address: int, rounded: int, stack: int = 0) -> tuple[Kind, dict[str, Any]]:
    row = {"address": BASE + address, "size": rounded - 1, "aux0": rounded, "flags": 3, "stack": stack}
    return Kind.HOST_ALLOC, row


def block_freed(address: int) -> tuple[Kind, dict[str, Any]]:
    return Kind.HOST_FREE, {"address": BASE + address, "flags": 3}


def held(made: Trace) -> list[tuple[Holder, str, str, int, int]]:
    found = analyze.pinned_holders(made)
    assert found is not None
    assert found.size == sum(site.size for site in found.sites)
    return [(site.holder, site.owner, site.label, site.size, site.count) for site in found.sites]


def test_memory_of_the_driver_is_of_its_library_and_call_site() -> None:
    made = trace(
        taken(0, 3 * MIB, 1),
        taken(8 * MIB, MIB, 3),
        taken(16 * MIB, MIB, 1),
        given_back(16 * MIB),
        taken(16 * MIB, MIB, 2, name="cuMemHostRegister"),
        given_back(0),
        **FRAMES,
    )
    assert [
        (Holder.LIBRARY, "the program itself", "train.py:1 (load)", 4 * MIB, 2),
        (Holder.LIBRARY, "cuBLAS", "train.py:4 (step) by libcublas.so.13", MIB, 1),
    ] == held(made)
    found = analyze.pinned_holders(made)
    assert found is not None
    assert (2, 1020, 5 * MIB, 2 * MIB) == (found.index, found.time, found.size, found.now)


def test_blocks_of_a_caching_allocator_are_of_those_that_asked_and_the_rest_is_cached() -> None:
    made = trace(
        taken(0, 4 * MIB, 1),
        block(0, MIB, 1),
        block(2 * MIB, MIB, 2),
        block(3 * MIB, MIB, 2),
        block_freed(0),
        taken(8 * MIB, MIB, 2),
        **FRAMES,
    )
    of = "cudatool's runtime"
    assert [
        (Holder.CACHED, of, "train.py:1 (load)", 2 * MIB, 1),
        (Holder.BLOCKS, of, "train.py:2 (keep)", 2 * MIB, 2),
        (Holder.LIBRARY, "the program itself", "train.py:2 (keep)", MIB, 1),
    ] == held(made)


def test_a_block_whose_memory_was_taken_before_the_recording_counts_itself() -> None:
    assert [(Holder.BLOCKS, "cudatool's runtime", "train.py:2 (keep)", MIB, 1)] == held(
        trace(block(0, MIB, 2), **FRAMES)
    )


def test_an_address_that_is_taken_again_ends_what_was_there() -> None:
    made = trace(taken(0, MIB), taken(0, 2 * MIB), given_back(0), given_back(0), taken(4 * MIB, MIB, flags=LIVED))
    found = analyze.pinned_holders(made)
    assert found is not None
    assert (2 * MIB, MIB) == (found.size, found.now)


def test_what_an_operator_of_pytorch_pins_lies_in_memory_of_the_driver() -> None:
    """The operator names the tensor, the driver's call the memory: it is there once."""
    made = trace(taken(0, 2 * MIB, 1), taken(0, MIB, 2, name="aten::_pin_memory"), **FRAMES)
    assert [(Holder.LIBRARY, "the program itself", "train.py:1 (load)", 2 * MIB, 1)] == held(made)


def test_a_recording_without_pinned_memory_has_no_holders() -> None:
    assert analyze.pinned_holders(trace(alloc(0, 512))) is None
