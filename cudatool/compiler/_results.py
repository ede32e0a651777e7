"""What a replay gives to the program: results, and the arrays that the function stores in its state.

Both lie in the graph's memory, which the next replay writes again. So a result is a copy, and all arrays that share its
memory are parts of that one copy. What the function only stores is not copied: no replay may run while the program
holds it in another place than the one where the function stored it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import gt, sub
from typing import Any

import numpy as np

from cudatool.compiler._plan import PlanArena
from cudatool.runtime._native import Region
from cudatool.runtime.array import DeviceArray, empty

__all__ = ["Results"]


class Results:
    """What a run of the function in its planned memory has returned and stored.

    Parameters
    ----------
    stored
        For each place: what sets it, and the value.
    inputs
        Where the graph reads arguments.
    """

    def __init__(
        self,
        outputs: Any,
        stored: list[tuple[Callable[[Any], None], Any]],
        inputs: Iterable[DeviceArray],
        arena: PlanArena,
    ) -> None:
        self._outputs, self._stored, self._arena = outputs, stored, arena
        self._copied = {id(_owner(array)) for array in _arrays(outputs)}
        kept = [array for _, value in stored for array in _arrays(value) if self._is_ours(array)]
        own = set(map(id, inputs))  # in whose place the program has its arguments
        kept = [array for array in kept if id(_owner(array)) not in self._copied and id(array) not in own]
        self._watched: list[object] = list(
            {id(part): part for array in kept for part in (array, _owner(array))}.values()
        )
        times = Counter(map(id, kept))
        self._in_place = [times[id(part)] for part in self._watched]
        self._holders: list[int] | None = None  # how many

    def is_held(self, *, in_place: bool) -> bool:
        """Return whether the program holds what the last replay stored in other places than that replay left it in.

        Parameters
        ----------
        in_place
            It is in those places. Else it may no longer be, and a reference there may be one elsewhere.
        """
        if self._holders is None:
            return False
        most = self._holders if in_place else map(sub, self._holders, self._in_place)
        return any(map(gt, self._count(), most))

    def hand_out(self, given: Mapping[int, DeviceArray]) -> Any:
        """Store what the function stores, and return what it returns.

        Parameters
        ----------
        given
            The arguments of the call, by the id of the graph's input.
        """
        copies: dict[int, DeviceArray] = {}
        self._store(given, copies)
        return self._mapped(self._outputs, given, copies)

    def note_holders(self) -> None:
        """Note who holds what was stored: only the places where it was stored, and the compiler."""
        self._holders = self._count()

    def _store(self, given: Mapping[int, DeviceArray], copies: dict[int, DeviceArray]) -> None:
        for put, value in self._stored:
            put(self._mapped(value, given, copies))

    def _count(self) -> list[int]:
        return [sys.getrefcount(part) for part in self._watched]

    def _is_ours(self, array: DeviceArray) -> bool:
        return self._arena.address <= array.data_ptr() < self._arena.address + self._arena.plan.peak

    def _mapped(self, value: Any, given: Mapping[int, DeviceArray], copies: dict[int, DeviceArray]) -> Any:
        if isinstance(value, DeviceArray):
            if id(value) in given:
                return given[id(value)]
            owner = _owner(value)
            if id(owner) not in self._copied or not self._is_ours(value):
                return value
            if id(value) not in copies:
                copies[id(value)] = _part_of_copy(value, owner, copies)
            return copies[id(value)]
        if type(value) in (list, tuple):
            return type(value)(self._mapped(part, given, copies) for part in value)
        if type(value) is dict:
            return {key: self._mapped(part, given, copies) for key, part in value.items()}
        return value


def _part_of_copy(array: DeviceArray, owner: object, copies: dict[int, DeviceArray]) -> DeviceArray:
    """Return what an array is in the copy of its memory, which all that share the memory have in common."""
    if not isinstance(owner, Region):
        return array.clone()
    if id(owner) not in copies:
        buffer: Any = owner
        layout = np.ndarray(owner.size, np.uint8, buffer)
        copies[id(owner)] = empty(owner.size, np.uint8, device=array.device).copy_(
            DeviceArray(layout, None, array.device)
        )
    memory: Any = _owner(copies[id(owner)])
    layout = np.ndarray(array.shape, array.dtype, memory, array.data_ptr() - owner.address, array.strides)
    return DeviceArray(layout, memory, array.device)


def _owner(array: DeviceArray) -> object:
    """Return what keeps the memory of an array."""
    if array._memory is not None:
        return array._memory
    owner: object = array.layout
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _arrays(value: Any) -> Iterator[DeviceArray]:
    if isinstance(value, DeviceArray):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if type(value) is dict else value:
            yield from _arrays(part)
