"""LLVM: text to native code."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from cudatool import progress
from cudatool.sim.host_library import library
from cudatool.sim.jit.code import Code, gather_mitigation
from cudatool.sim.jit.gathers import ONE_VECTOR
from cudatool.sim.jit.races import CALLABLE

__all__ = [
    "LlvmError",
    "compile_text",
    "compiled",
    "load_object",
    "processor",
]

compiled = 0  # kernels that went through LLVM in this process, rather than come from the cache
_lock = threading.Lock()
_LONG_S = 10.0  # of compiling, after which a line says so where there is no terminal


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in _CALLABLE:
        llvm.add_symbol(name, ctypes.cast(getattr(library(), name), ctypes.c_void_p).value)
    return llvm.Target.from_default_triple()


@cache
def _machine(level: int, *, gathers: bool = False, wide: bool = False) -> Any:
    return _target().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=_features(gathers=gathers, wide=wide),
        opt=level,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


_AMD = ("znver",)
_INTEL = ("skylake", "cascadelake", "cooperlake", "cannonlake", "icelake", "tigerlake", "rocketlake")
"""Whose gathers leak data, until microcode makes them slow (2023): a gather of eight takes 8.6 ns, its loads 2.4."""
_FAST_GATHERS = ("Not affected", "Vulnerable")
"""How Linux's words on that begin where gathers are as fast as they were. A hypervisor may give a later processor the
name of one of these: there a gather of eight took 1.1 ns, its loads 1.7."""


_NO_GATHERS = "+prefer-no-gather"
_UNSLOWED = "+avx512fp16"
"""What Intel's processors have whose clock the widest vectors do not slow: from Sapphire Rapids on."""


def _features(*, gathers: bool = False, wide: bool = False) -> str:
    """Return what the host's processor has, and is to be used of that."""
    found = str(llvm.get_host_cpu_features().flatten())
    if wide and _UNSLOWED in found.split(","):
        found += ",-prefer-256-bit"
    name = llvm.get_host_cpu_name()
    slowed = name.startswith(_INTEL) and not gather_mitigation().startswith(_FAST_GATHERS)
    if gathers or not (slowed or name.startswith(_AMD)):
        return found
    # AMD's processors take longer for a gather than for its loads one by one (a bitonic sort: a fifth longer), and for
    # a scatter than for its stores (a sorting network: a tenth).
    return f"{found},{_NO_GATHERS}" + (",+prefer-no-scatter" if name.startswith(_AMD) else "")


def processor() -> str:
    """Return what LLVM knows of this processor."""
    return f"{llvm.get_host_cpu_name()} {_features()}"


class LlvmError(Exception):
    """LLVM refuses a module: the translator made a mistake.

    Parameters
    ----------
    reason
        What LLVM says.
    line
        Of the text, from 1; 0 if LLVM names none.
    """

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason, line)
        self.reason, self.line = reason, line


def compile_text(text: str, *, optimized: bool = True, gathers: bool = False, wide: bool = False) -> bytes:
    """Return the object code of an LLVM module; raise LlvmError where LLVM refuses it.

    Code that is not `optimized` computes the same, takes a tenth of the time to compile, and several times as long to
    run. With `gathers`, these are made also where the host's processor is slow at it (:mod:`.gathers`). With `wide`,
    vectors are as wide as the host has them: LLVM's are half of that, as the other half slowed processors once.
    """
    global compiled
    with _lock:
        compiled += 1
        began = time.monotonic()
        with progress.step(f"compiling kernels, {compiled} so far", before_s=_compiling.took_s):
            code = _compiled(text, optimized=optimized, gathers=gathers, wide=wide)
        _compiling.add(time.monotonic() - began)
        return code


_LARGE = 600_000
"""Characters of a module from which on loops are not unrolled. Such modules have many short loops, one over the threads
between two barriers or shuffles each; unrolled, they take twice as long to compile and run no faster. Loops that
threads run together (:mod:`.together`) need it: their arrays become registers once the loops over them are gone."""


class _Compiling:
    """How long this process has compiled kernels."""

    def __init__(self) -> None:
        self.took_s = 0.0
        self.is_noted = False

    def add(self, seconds: float) -> None:
        self.took_s += seconds
        if self.took_s > _LONG_S and not self.is_noted:
            self.is_noted = True
            progress.note(
                f"cudatool: compiling kernels has taken {self.took_s:.0f} s so far, for {compiled} of them; "
                "they are kept for the next run"
            )


_compiling = _Compiling()


def _compiled(text: str, *, optimized: bool, gathers: bool, wide: bool) -> bytes:
    machine = _machine(3 if optimized else 0, gathers=gathers, wide=wide)
    try:
        module = llvm.parse_assembly(_suited(text, gathers=gathers))
    except RuntimeError as error:
        place = re.search(r"<string>:(\d+):\d+: error: (.*)", str(error))
        raise LlvmError(place[2] if place else str(error), int(place[1]) if place else 0) from None
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = False  # threads are the vectors
    options.loop_unrolling = len(text) < _LARGE
    builder = llvm.create_pass_builder(machine, options)
    (builder.getModulePassManager() if optimized else _least()).run(module, builder)
    return bytes(machine.emit_object(module))


def _suited(text: str, *, gathers: bool) -> str:
    """Return the text for the host's processor: without vectors that it would have to gather, if it is slow at it."""
    return text.replace(f", {ONE_VECTOR}", "") if _NO_GATHERS in _features(gathers=gathers) else text


def _least() -> Any:
    """Return what is done to code that is not optimized: its variables become registers, before and after inlining."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_always_inliner_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_sroa_pass()
    return passes


def load_object(data: bytes) -> Code:
    """Link object code into this process, of any kind that LLVM makes."""
    with _lock:
        empty = llvm.parse_assembly("")
        empty.triple = _machine(0).triple
        engine = llvm.create_mcjit_compiler(empty, _target().create_target_machine(jit=True))
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        engine.finalize_object()
        return Code(engine, engine.get_function_address("grid"))


# What native code may call (cudatool/sim/_device.c, cudatool/sim/_texture.c).
_CALLABLE = (
    *("cudatool_vprintf", "cudatool_malloc", "cudatool_block_bytes", "cudatool_free", "cudatool_assert"),
    *("cudatool_rounded_f32", "cudatool_rounded_f64"),
    *("cudatool_texture_level", "cudatool_texture_gradient", "cudatool_gather", "cudatool_texels"),
    "cudatool_surface",
    *CALLABLE,
)
