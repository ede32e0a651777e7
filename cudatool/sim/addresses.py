"""Where an address lies that no access may touch, in words: beside which allocation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cudatool.sim.allocations import Allocation, Allocations
from cudatool.units import format_bytes

__all__ = ["place_of", "pointer_behind"]

_FAR: Final = 1 << 20  # an address farther than this from an allocation is near it only if it is known why


def pointer_behind(pointers: Iterable[int], allocations: Allocations) -> int:
    """Return the one of the `pointers` that an access must have been computed from; 0 if that is not certain.

    The others of them are not addresses of memory: a number may be an argument of 64 bits, too.
    """
    owners = {found.address: pointer for pointer in pointers if (found := allocations.holding(pointer)) is not None}
    return next(iter(owners.values())) if len(owners) == 1 else 0


def place_of(address: int, size: int, allocations: Allocations, pointer: int = 0) -> str:
    """Return how an access of `size` bytes lies to the allocation of the `pointer` that it was computed from.

    Without one, to the nearest allocation; empty if none is near.
    """
    owner = allocations.holding(pointer) if pointer else None
    if owner is not None:
        return _beside(address, size, owner)
    before, after = allocations.before(address), allocations.after(address)
    if before is not None and address < before.address + before.size + _FAR:
        return _beside(address, size, before)
    if after is not None and after.address - address < _FAR:
        return _beside(address, size, after)
    return ""


def _beside(address: int, size: int, owner: Allocation) -> str:
    stop, whole = owner.address + owner.size, format_bytes(owner.size)
    if address < owner.address:
        return f"{owner.address - address:,} bytes before the start of an allocation of {whole}"
    if owner.variables:
        return _beside_variable(address, owner)
    if address + size <= stop:
        return f"inside of memory of {whole}, of which this part is not given out"
    place = f"{address - stop:,} bytes after" if address >= stop else "across"
    return f"{place} the end of an allocation of {whole}"


def _beside_variable(address: int, owner: Allocation) -> str:
    offset = address - owner.address
    before = [variable for variable in owner.variables if variable.offset <= offset]
    variable = max(before or owner.variables, key=lambda one: one.offset)  # arrays are overrun more often than underrun
    past = offset - variable.offset - variable.size
    place = f"{past:,} bytes after" if past >= 0 else "across"
    constant = "__constant__ " if variable.is_constant else ""
    return f"{place} the end of the {constant}variable {variable.name} of {format_bytes(variable.size)}"
