"""A kernel's native code: a variant for each form in which launches need it, kept between processes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cudatool.sim.jit import native
from cudatool.sim.jit.instrument import Instrument, Needless
from cudatool.sim.jit.kernel_text import KernelText
from cudatool.sim.jit.native import MARK
from cudatool.sim.jit.unsupported import UnsupportedInstruction, UntranslatedInstruction

if TYPE_CHECKING:
    from cudatool.sim.jit.codegen import Native

__all__ = ["Translated", "Translation", "Variant"]

_MAX_VARIANTS = 4  # of a kernel's code that differ in which checks are left out


class Variant(NamedTuple):
    """A form of a kernel's code: see :func:`.generate`, and :func:`.compile_text` for `optimized`."""

    instrument: Instrument
    optimized: bool
    large_grid: bool = False
    needless: Needless = frozenset()


@dataclass(frozen=True, slots=True)
class Translated:
    """Native code of one variant of a kernel; for the rest see :class:`.Native`."""

    code: native.Code
    slot_bytes: int
    parks: bool
    counts: bool
    steps: bool


class Translation:
    """The variants of one kernel that there are, by what they are."""

    def __init__(self, text: KernelText) -> None:
        self._text = text
        self.variants: dict[Variant, Translated] = {}

    def code(self, variant: Variant) -> Translated:
        """Translate the kernel, or fetch its native code from the cache.

        Raises
        ------
        UnsupportedInstruction
            The kernel uses an instruction that the software device does not have.
        PtxError
            The kernel cannot be translated for another reason.
        """
        found = self.variants.get(variant)
        if found is not None:
            return found
        image = self._text.image
        called = (function for function in image.ptx.functions.values() if not function.is_kernel)
        used = [self._text.declared, *called]
        texts = [f"{function.line} {function.text}" for function in used]  # native code names lines of the PTX
        instrument, optimized, large_grid, needless = variant
        form = f"{int(instrument)}, optimized={optimized}, large_grid={large_grid}, needless={sorted(needless)}"
        key = native.cache_key(image.ptx.preamble, *texts, form)
        data = None if image.cache is None else image.cache.get(key)
        if data is None:
            made = self.generate(variant)
            facts = struct.pack("<Q???5x", made.slot_bytes, made.parks, made.counts, made.in_step)
            data = facts + self._compiled(made, variant)
            if image.cache is not None:
                image.cache.put(key, data)
        translated = Translated(native.load_object(data[16:]), *struct.unpack_from("<Q???", data))
        # Another thread may have been faster: a plan that has its code has only an address, and this must stay mapped.
        return self.variants.setdefault(variant, translated)

    def generate(self, variant: Variant, *, marked: bool = False) -> Native:
        """Return what LLVM optimizes and compiles for :meth:`code`, without doing either. Raises as that does."""
        from cudatool.sim.jit.codegen import generate  # takes a while to load: kernels in the cache need none of it

        try:
            return generate(
                self._text.stepping if variant.instrument else self._text.plain,
                self._text.layout if variant.instrument else self._text.plain_layout,
                instrument=variant.instrument,
                large_grid=variant.large_grid,
                needless=variant.needless,
                counts_rounds=not variant.optimized,
                marked=marked,
            )
        except UnsupportedInstruction as error:
            raise self._located(error) from None

    def _compiled(self, made: Native, variant: Variant) -> bytes:
        try:
            return native.compile_text(made.text, optimized=variant.optimized, gathers=made.gathers)
        except native.CompileError:
            pass
        marked = self.generate(variant, marked=True).text
        try:  # again, to see which instruction it is
            return native.compile_text(marked, optimized=variant.optimized, gathers=made.gathers)
        except native.CompileError as error:
            before = marked.split("\n")[: error.line]
            # What is wrong outside of the functions of the kernel's threads has no mark above it in its function.
            inside = next((text for text in reversed(before) if text.startswith((MARK, "define", "}"))), "")
            line, what = 0, "the kernel"
            if inside.startswith(MARK):
                number, _, what = inside.removeprefix(MARK).partition(" ")
                line = int(number)
            raise self._located(UntranslatedInstruction(what, self._text.name, None, line, error.reason)) from None

    def _located(self, error: UnsupportedInstruction) -> UnsupportedInstruction:
        return error.at(self._text.name, self._text.find_source(error.line))

    def nearest(self, variant: Variant, left_out: Needless) -> Needless:
        """Return which of the checks `left_out` are left out by code that there is, or for which there is room.

        `variant` is what leaves none out.
        """
        made = [known.needless for known in list(self.variants) if known._replace(needless=variant.needless) == variant]
        if left_out in made or len(made) < _MAX_VARIANTS:
            return left_out
        return max((known for known in made if known <= left_out), key=len, default=Needless())
