"""From a kernel's PTX to native code."""

from __future__ import annotations

import struct

from cudatool.sim.jit import native
from cudatool.sim.jit.code import MARK
from cudatool.sim.jit.codegen import Native, generate
from cudatool.sim.jit.kernel_text import KernelText
from cudatool.sim.jit.translation import Variant
from cudatool.sim.jit.unsupported import UnsupportedInstruction, UntranslatedInstruction

__all__ = ["generated", "translated"]


def translated(text: KernelText, variant: Variant) -> bytes:
    """Return what is kept of a variant: what launches must know of its code, 16 bytes, and object code.

    Raises
    ------
    UnsupportedInstruction
        The kernel uses an instruction that the software device does not have.
    PtxError
        The kernel cannot be translated for another reason.
    """
    made = generated(text, variant)
    facts = struct.pack("<Q???5x", made.slot_bytes, made.parks, made.counts, made.in_step)
    return facts + _compiled(text, made, variant)


def generated(text: KernelText, variant: Variant, *, marked: bool = False) -> Native:
    """Return what LLVM optimizes and compiles for :func:`translated`, without doing either. Raises as that does."""
    try:
        return generate(
            text.stepping if variant.instrument else text.plain,
            text.layout if variant.instrument else text.plain_layout,
            instrument=variant.instrument,
            large_grid=variant.large_grid,
            needless=variant.needless,
            counts_rounds=not variant.optimized,
            marked=marked,
        )
    except UnsupportedInstruction as error:
        raise _located(text, error) from None


def _compiled(text: KernelText, made: Native, variant: Variant) -> bytes:
    try:
        return native.compile_text(made.text, optimized=variant.optimized, gathers=made.gathers, wide=made.wide)
    except native.LlvmError:
        pass
    marked = generated(text, variant, marked=True).text
    try:  # again, to see which instruction it is
        return native.compile_text(marked, optimized=variant.optimized, gathers=made.gathers, wide=made.wide)
    except native.LlvmError as error:
        before = marked.split("\n")[: error.line]
        # What is wrong outside of the functions of the kernel's threads has no mark above it in its function.
        inside = next((text for text in reversed(before) if text.startswith((MARK, "define", "}"))), "")
        line, what = 0, "the kernel"
        if inside.startswith(MARK):
            number, _, what = inside.removeprefix(MARK).partition(" ")
            line = int(number)
        raise _located(text, UntranslatedInstruction(what, text.name, None, line, error.reason)) from None


def _located(text: KernelText, error: UnsupportedInstruction) -> UnsupportedInstruction:
    return error.at(text.name, text.find_source(error.line))
