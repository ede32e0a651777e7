"""LLVM: text to native code; and calling it so that a fault ends the call, not the process."""

from __future__ import annotations

import ctypes
import hashlib
import re
import signal
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import llvmlite.binding as llvm

from cudatool import progress
from cudatool.sim import _calls, signals
from cudatool.sim.host_library import library
from cudatool.sim.jit.races import CALLABLE

__all__ = [
    "MARK",
    "STOP_SIGNAL",
    "Code",
    "CompileError",
    "NativeCache",
    "cache_key",
    "compile_text",
    "compiled",
    "guarded_call",
    "load_object",
]

MARK = "; PTX "
"""Begins the comment that stands before the code of an instruction: its line in the PTX, and what it is."""

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
def _machine(level: int, *, gathers: bool = False) -> Any:
    return _target().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=_features(gathers=gathers),
        opt=level,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


def _features(*, gathers: bool = False) -> str:
    """Return what the host's processor has, and is to be used of that."""
    found = str(llvm.get_host_cpu_features().flatten())
    # AMD's processors take longer for a gather than for its loads one by one (a bitonic sort: a fifth longer).
    is_slow = llvm.get_host_cpu_name().startswith("znver") and not gathers
    return f"{found},+prefer-no-gather" if is_slow else found


@cache
def _source_digest() -> bytes:
    """Return a digest of the translator's own source: native code made by another version is not used."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(__file__).parents[2] / "ptx"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()


class NativeCache(Protocol):
    """Keeps native code between processes. What it returns is whole, and as it was put: LLVM would crash on less."""

    def get(self, key: str) -> bytes | None:
        """Return what is kept under `key`, or None."""

    def put(self, key: str, data: bytes) -> None:
        """Keep `data`, if it can be kept."""


def cache_key(*parts: str) -> str:
    """Return the name under which native code is kept: depends on `parts`, the host CPU, LLVM and the translator."""
    digest = hashlib.sha256(_source_digest())
    for part in (*parts, llvm.get_host_cpu_name(), _features(), str(llvm.llvm_version_info)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


class CompileError(Exception):
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


def compile_text(text: str, *, optimized: bool = True, gathers: bool = False) -> bytes:
    """Return the object code of an LLVM module; raise CompileError where LLVM refuses it.

    Code that is not `optimized` computes the same, takes a tenth of the time to compile, and several times as long to
    run. With `gathers`, these are made also where the host's processor is slow at it (:mod:`.gathers`).
    """
    global compiled
    with _lock:
        compiled += 1
        began = time.monotonic()
        with progress.step(f"compiling kernels, {compiled} so far", before_s=_compiling.took_s):
            code = _compiled(text, optimized=optimized, gathers=gathers)
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


def _compiled(text: str, *, optimized: bool, gathers: bool) -> bytes:
    machine = _machine(3 if optimized else 0, gathers=gathers)
    try:
        module = llvm.parse_assembly(text)
    except RuntimeError as error:
        place = re.search(r"<string>:(\d+):\d+: error: (.*)", str(error))
        raise CompileError(place[2] if place else str(error), int(place[1]) if place else 0) from None
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = False  # threads are the vectors
    options.loop_unrolling = len(text) < _LARGE
    builder = llvm.create_pass_builder(machine, options)
    (builder.getModulePassManager() if optimized else _least()).run(module, builder)
    return bytes(machine.emit_object(module))


def _least() -> Any:
    """Return what is done to code that is not optimized: its variables become registers, before and after inlining."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_always_inliner_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_sroa_pass()
    return passes


class Code:
    """Native code in memory; `entry` is the address of its function ``grid``."""

    def __init__(self, engine: Any, entry: int) -> None:
        self._engine = engine  # owns the memory
        self.entry = entry


def load_object(data: bytes) -> Code:
    """Link object code into this process."""
    with _lock:
        empty = llvm.parse_assembly("")
        empty.triple = _machine(0).triple
        engine = llvm.create_mcjit_compiler(empty, _target().create_target_machine(jit=True))
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        engine.finalize_object()
        return Code(engine, engine.get_function_address("grid"))


STOP_SIGNAL = int(signal.SIGRTMIN) + 12
"""Ends the native code that the thread runs that it is sent to (``cudatool_stop_signal``)."""


def guarded_call(function: int, argument: int, address: int, limit_ns: int = 0) -> int:
    """Run native code; return 0 or the signal that ended it, with the faulting address in the 8 bytes at `address`.

    On the main thread, Ctrl-C ends it if it will end the program. It is ended by STOP_SIGNAL after `limit_ns`, unless
    that is 0.
    """
    return _calls.guarded_call(function, argument, address, signals.interrupts(), limit_ns)


# What native code may call (cudatool/sim/_device.c, cudatool/sim/_texture.c).
_CALLABLE = (
    *("cudatool_vprintf", "cudatool_malloc", "cudatool_block_bytes", "cudatool_free", "cudatool_assert"),
    *("cudatool_rounded_f32", "cudatool_rounded_f64"),
    *("cudatool_texture_level", "cudatool_texture_gradient", "cudatool_gather", "cudatool_texels"),
    "cudatool_surface",
    *CALLABLE,
)
