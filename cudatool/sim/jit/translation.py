"""A kernel's native code: a variant for each form in which launches need it, kept between processes."""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cudatool.loading.whole_imports import whole_imports
from cudatool.sim.jit import code
from cudatool.sim.jit.code import cache_key
from cudatool.sim.jit.instrument import Instrument, Needless

if TYPE_CHECKING:
    from collections.abc import Callable

    from cudatool.sim.jit.code import NativeCache
    from cudatool.sim.jit.codegen import Native
    from cudatool.sim.jit.kernel_text import KernelText

__all__ = ["Translated", "Translation", "Variant"]

_MAX_VARIANTS = 4  # of a kernel's code that differ in which checks are left out


class Variant(NamedTuple):
    """A form of a kernel's code: see :func:`.codegen.generate`, and :func:`.compile_text` for `optimized`."""

    instrument: Instrument
    optimized: bool
    large_grid: bool = False
    needless: Needless = frozenset()


class Translated(NamedTuple):
    """Native code of one variant of a kernel; for the rest see :class:`.Native`."""

    code: code.Code
    slot_bytes: int
    parks: bool
    counts: bool
    steps: bool


class Translation:
    """The variants of one kernel that there are, by what they are.

    Parameters
    ----------
    digest
        Of the text that its code is made of.
    text
        Gives that text, which is read only if there is no code.
    cache
        Where native code is kept between processes; None keeps none.
    """

    def __init__(self, digest: str, text: Callable[[], KernelText], cache: NativeCache | None) -> None:
        self._digest, self._text, self._cache = digest, text, cache
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
        instrument, optimized, large_grid, needless = variant
        form = f"{int(instrument)}, optimized={optimized}, large_grid={large_grid}, needless={sorted(needless)}"
        key = cache_key("code", self._digest, form)
        data = None if self._cache is None else self._cache.get(key)
        if data is None:
            data = _translator().translated(self._text(), variant)
            if self._cache is not None:
                self._cache.put(key, data)
                if optimized:
                    self._cache.put(self._optimized_key(instrument), b"")
        translated = Translated(code.load_object(data[16:]), *struct.unpack_from("<Q???", data))
        # Another thread may have been faster: a plan that has its code has only an address, and this must stay mapped.
        return self.variants.setdefault(variant, translated)

    def was_optimized(self, instrument: Instrument) -> bool:
        """Return whether this or an earlier process, whose code was kept, has optimized code with these checks.

        Or whether an earlier one has said that it may pay (:meth:`expect`).
        """
        return self._cache is not None and self._cache.get(self._optimized_key(instrument)) is not None

    def expect(self, instrument: Instrument) -> None:
        """Let later processes optimize the code with these checks as soon as if it were kept."""
        if self._cache is not None:
            self._cache.put(self._optimized_key(instrument), b"")

    def _optimized_key(self, instrument: Instrument) -> str:
        return cache_key("optimized", self._digest, str(int(instrument)))

    def generate(self, variant: Variant) -> Native:
        """Return what LLVM optimizes and compiles for :meth:`code`, without doing either. Raises as that does."""
        made: Native = _translator().generated(self._text(), variant)
        return made

    def nearest(self, variant: Variant, left_out: Needless) -> Needless:
        """Return which of the checks `left_out` are left out by code that there is, or for which there is room.

        `variant` is what leaves none out.
        """
        made = [known.needless for known in list(self.variants) if known._replace(needless=variant.needless) == variant]
        if left_out in made or len(made) < _MAX_VARIANTS:
            return left_out
        return max((known for known in made if known <= left_out), key=len, default=Needless())


@cache
def _translator() -> Any:
    with whole_imports():
        from cudatool.sim.jit import translator  # takes a while to load: kernels in the cache need none of it

    return translator
