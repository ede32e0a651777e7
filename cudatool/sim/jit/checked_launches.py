"""How the launches of a kernel are checked: what code looks for, and which of its checks are left out."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING

from cudatool.ptx import Immediate, opcode_of
from cudatool.ptx.model import PROGRAMS
from cudatool.ptx.observation import has_mixed_accesses
from cudatool.sim.jit.argument_ranges import ArgumentRanges
from cudatool.sim.jit.collective import Kind, suspension_of
from cudatool.sim.jit.independent import Independent, needless
from cudatool.sim.jit.instrument import Checked, Instrument, Needless
from cudatool.sim.jit.kernel_text import KernelText
from cudatool.sim.jit.launch_options import LaunchShape
from cudatool.sim.jit.race_engine import Order
from cudatool.sim.jit.translation import Translation, Variant

if TYPE_CHECKING:
    from cudatool.sim.jit.shadow import Shadow

__all__ = ["CheckedLaunches"]

_MEMORY = Instrument.MEMCHECK | Instrument.INITCHECK
_MOST_CHECKED = 64  # launches that a kernel keeps for how they are checked


class CheckedLaunches:
    """What is known of one kernel that decides how its launches are checked."""

    def __init__(self, text: KernelText, translation: Translation) -> None:
        self._text = text
        self._translation = translation
        self.found: dict[tuple[object, ...], Checked] = {}

    def find(self, shape: LaunchShape, params: int, variant: Variant, shadow: Shadow) -> Checked:
        """Return how a launch is checked: found once for launches that are alike while memory is as it was.

        `variant` is its code if no check is left out.
        """
        instrument = variant.instrument
        arguments = ctypes.string_at(params, self._text.layout.param_bytes)
        key = shadow.version, arguments, shape, variant
        if (known := self.found.get(key)) is not None:
            return known
        device = range(shadow.base, shadow.base + shadow.size)
        of_launch = self.independent.of_launch(arguments, shape.grid, shape.block, device, self._text.address_of)
        left_out = needless(of_launch, instrument, shadow, self._text.shared_bytes(shape.shared_bytes))
        is_plain = self.independent.leaves_nothing(instrument, left_out)
        if not is_plain:
            left_out = self._translation.nearest(variant, left_out)
        around, sound = self.argument_ranges, tuple[tuple[int, int], ...]()
        if any((kind, line) not in left_out for kind in _MEMORY & instrument for line in around.of_line):
            sound = tuple(shadow.sound_around(pointer) for pointer in around.addresses(arguments))
        fills = bool(instrument & Instrument.INITCHECK) and self.independent.may_write(
            {line for check, line in left_out if check is Instrument.INITCHECK}
        )
        if len(self.found) >= _MOST_CHECKED:
            self.found.clear()
        code = (Instrument.NONE, Needless()) if is_plain else (instrument, left_out)
        found = self.found[key] = Checked(*code, of_launch.written, sound, fills=fills)
        return found

    @cached_property
    def order(self) -> Order:
        """What orders the kernel's threads."""
        programs = PROGRAMS in self._text.function.pragmas
        return Order(self._acquires, self._is_plain, programs=programs, observes=self._observes)

    @cached_property
    def uses_heap(self) -> bool:
        """Whether the kernel allocates memory or frees it."""
        return bool(self._text.system_calls & {"malloc", "free"})

    @cached_property
    def independent(self) -> Independent:
        """Which of the kernel's accesses cannot meet others."""
        return Independent(self._text.function, self._text.layout.param_offsets, plain=self._is_plain)

    @cached_property
    def argument_ranges(self) -> ArgumentRanges:
        """Which of the kernel's arguments its accesses are computed from."""
        return ArgumentRanges.of(self._text.function, self._text.layout.param_offsets)

    @cached_property
    def _observes(self) -> bool:
        """Whether threads may access plainly what they have read a strong write of."""
        return has_mixed_accesses(self._text.function)

    @cached_property
    def _acquires(self) -> bool:
        """Whether threads may learn, by flags, what was done in other blocks."""
        orders = {"acquire", "acq_rel"}
        return self._observes or any(
            opcode_of(i.opcode).is_fence or (i.opcode != "mbarrier" and orders.intersection(i.modifiers))
            for i in self._text.function.instructions
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether nothing but barriers of the whole block orders threads."""
        return not self._acquires and self._has_plain_barriers

    @cached_property
    def _has_plain_barriers(self) -> bool:
        """Whether nothing but barriers of the whole block orders the threads of a block."""
        for i in self._text.function.instructions:
            row = suspension_of(i)
            if (
                i.opcode == "mbarrier"
                or {"async", "cluster"} & {*i.modifiers}
                or (i.opcode == "bar" and "warp" in i.modifiers)
            ):
                return False
            if row is not None and row.kind not in (Kind.WARP, Kind.PRESENT):
                if row.kind not in (Kind.BARRIER, Kind.BARRIER_REDUCE):
                    return False
                counts = [operand for name, operand, _ in row.leave(i) if name == "b"]
                if not all(isinstance(operand, Immediate) and not operand.value for operand in counts):
                    return False
        return True
