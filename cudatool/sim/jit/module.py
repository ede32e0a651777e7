"""A PTX module as something that can be launched."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from cudatool.ptx import (
    FRAME_SCALE,
    Function,
    Immediate,
    Instruction,
    KernelAccesses,
    Module,
    ModuleCalls,
    PtxError,
    Symbol,
    accesses_of_launch,
    function_addresses,
    infer_accesses,
    merge_calls,
    opcode_of,
    parse_image,
    pointers_at,
)
from cudatool.ptx.kernel_names import kernel_name
from cudatool.ptx.model import PROGRAMS
from cudatool.sim.jit import native
from cudatool.sim.jit.argument_ranges import ArgumentRanges
from cudatool.sim.jit.codegen import MARK, Native, generate
from cudatool.sim.jit.collective import Kind, suspension_of
from cudatool.sim.jit.context import MAX_THREADS, Context, Stop
from cudatool.sim.jit.copies import separate_copies
from cudatool.sim.jit.emit import Layout, UnsupportedInstruction, UntranslatedInstruction
from cudatool.sim.jit.footprint import Footprint
from cudatool.sim.jit.host_places import HostPlaces
from cudatool.sim.jit.independent import Independent, needless
from cudatool.sim.jit.instrument import Instrument, Needless
from cudatool.sim.jit.launch import (
    KernelAssert,
    KernelDeadlock,
    KernelError,
    KernelStackOverflow,
    KernelTimeout,
    KernelTrap,
    NativeLaunch,
    Stopped,
    Wait,
    run,
    take_message,
    workers_for,
)
from cudatool.sim.jit.native import NativeCache
from cudatool.sim.jit.progress import insert_yields
from cudatool.sim.jit.race_engine import Order
from cudatool.sim.jit.regions import REPEATABLE, goes_by_rows
from cudatool.sim.jit.runs import join_products
from cudatool.sim.jit.shadow import Found, Launching, Shadow
from cudatool.sim.jit.steps import insert_steps
from cudatool.sim.jit.system import SYSTEM
from cudatool.sim.jit.team import Plan, Team, run_plain, why_ended
from cudatool.source_text import SourceLine

_MEMORY = Instrument.MEMCHECK | Instrument.INITCHECK
_MAX_VARIANTS = 4  # of a kernel's code that differ in which checks are left out

MAX_STACK = 256 << 10
"""Largest stack of a thread, bytes as CU_LIMIT_STACK_SIZE counts them."""

_MOST_CHECKED = 64  # launches that a kernel keeps for how they are checked
_MOST_PLANS = 256  # shapes of launches that a kernel keeps what they need for

__all__ = ["MAX_STACK", "GlobalVariable", "JitModule", "JitKernel", "Param", "load"]


@dataclass(frozen=True, slots=True)
class Param:
    """A kernel parameter: where it lies in the packed buffer, bytes. `is_pointer` is what ``.ptr`` says, a hint."""

    offset: int
    size: int
    align: int
    is_pointer: bool


@dataclass(frozen=True, slots=True)
class GlobalVariable:
    """A variable that the driver must place in device memory.

    Attributes
    ----------
    initial
        Its first bytes; the rest is zero.
    relocations
        ``(offset, symbol, addend)``: the 8 bytes at `offset` hold the address of `symbol` plus `addend`.
    """

    name: str
    size: int
    align: int
    initial: bytes
    relocations: list[tuple[int, str, int]]
    constant: bool


def load(ptx: bytes, *, cache: NativeCache | None = None) -> JitModule:
    """Read a PTX module or a linked image. Nothing is translated before :meth:`JitKernel.prepare`.

    Parameters
    ----------
    ptx
        The text, with or without a terminating NUL.
    cache
        Where native code is kept between processes; None keeps none.

    Raises
    ------
    PtxError
        The text is not PTX.
    """
    return JitModule(parse_image(ptx), cache)


class JitModule:
    """A loaded module.

    Attributes
    ----------
    kernels
        By name, as PTX spells it.
    globals
        ``.global`` and ``.const`` variables that the module defines.
    numbers
        Where each of them stands in the table of their addresses.
    functions
        What pointers to its device functions hold.
    """

    def __init__(self, module: Module, cache: NativeCache | None) -> None:
        self._module = module
        self.cache = cache
        self.globals: dict[str, GlobalVariable] = {
            variable.name: GlobalVariable(
                variable.name,
                variable.size,
                variable.align,
                variable.initial,
                [(r.offset, r.symbol, r.addend) for r in variable.relocations],
                variable.space == "const",
            )
            for variable in module.variables.values()
            if variable.space in ("global", "const")
        }
        self.numbers = {name: number for number, name in enumerate(self.globals)}
        self.functions = function_addresses(module)
        self.table = (ctypes.c_uint64 * max(len(self.globals), 1))()
        self.kernels: Mapping[str, JitKernel] = {
            name: JitKernel(self, function) for name, function in module.kernels.items() if function.has_body
        }

    @cached_property
    def calls(self) -> ModuleCalls:
        """Which of its functions call which."""
        return ModuleCalls.of(self._module)

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Say where the module's global variables lie."""
        for name, number in self.numbers.items():
            if name in addresses:
                self.table[number] = addresses[name]


class _Variant(NamedTuple):
    """A form of a kernel's code: see :func:`.generate`, and :func:`.compile_text` for `optimized`."""

    instrument: Instrument
    optimized: bool
    large_grid: bool = False
    needless: Needless = frozenset()


@dataclass(frozen=True, slots=True)
class _Translated:
    """Native code of one variant of a kernel; for the rest see :class:`.Native`."""

    code: native.Code
    slot_bytes: int
    parks: bool
    counts: bool
    steps: bool


@dataclass(frozen=True, slots=True)
class _Checked:
    """How a launch is checked.

    Attributes
    ----------
    kinds
        What its code looks for.
    left_out
        Those that would find nothing.
    written, sound
        See :meth:`.Shadow.prepare`.
    fills
        Whether memory may have more values after it, which later checks could leave out.
    """

    kinds: Instrument
    left_out: Needless
    written: range | None
    sound: tuple[tuple[int, int], ...]
    fills: bool


class JitKernel:
    """A kernel of a :class:`JitModule`.

    Attributes
    ----------
    name
        As PTX spells it.
    params, param_bytes, param_layout
        Its parameters and the size of the packed buffer that holds them.
    max_threads
        Of a block.
    source_file
        The CUDA source, where known (``-lineinfo``), else empty.
    """

    def __init__(self, module: JitModule, function: Function) -> None:
        self._owner = module
        self._declared = function
        self._inlined: Function | None = None
        self._refused: UnsupportedInstruction | None = None
        self._rounds = ctypes.c_uint64()
        self._layout: Layout | None = None
        self._accesses: KernelAccesses | None = None
        self._variants: dict[_Variant, _Translated] = {}
        self._plans: dict[tuple[object, ...], Plan | None] = {}
        self._checked: dict[tuple[object, ...], _Checked] = {}
        self.name = function.name
        layout = Layout.of_params(function)
        self.params = tuple(Param(layout.param_offsets[p.name], p.size, p.align, p.pointer) for p in function.params)
        self.param_bytes = layout.param_bytes
        self.param_layout = b"".join(struct.pack("II", p.offset, p.size) for p in self.params)
        limits = function.directives.get("maxntid") or function.directives.get("reqntid")
        self.max_threads = MAX_THREADS
        if limits:
            self.max_threads = 1
            for limit in limits:
                self.max_threads *= limit

    @property
    def rounds(self) -> int:
        """How often threads went back to the beginning of a loop, so far, in code that is not optimized."""
        return self._rounds.value

    # ---- what is known without translating ----

    @property
    def _function(self) -> Function:
        if self._refused is not None:
            raise self._refused
        if self._inlined is None:
            try:
                owner = self._owner
                merged = merge_calls(owner._module, self._declared, FRAME_SCALE * MAX_STACK, owner.calls)
                self._inlined = insert_yields(merged)
            except PtxError as error:
                self._refused = UnsupportedInstruction(f"call ({error.args[0]})", self.name, None, error.line)
                raise self._refused from None
        return self._inlined

    @cached_property
    def _stepping(self) -> Function:
        """What is translated: its threads step together in some loops, and make rows of matrix operations at once."""
        return join_products(insert_steps(separate_copies(self._function, REPEATABLE)))

    @cached_property
    def _plain(self) -> Function:
        """What is translated if nothing is checked or measured: without steps where rows go around loops together."""
        function = join_products(separate_copies(self._function, REPEATABLE))
        return function if goes_by_rows(function, self.layout) else self._stepping

    @property
    def layout(self) -> Layout:
        """Where the kernel's variables lie."""
        if self._layout is None:
            self._layout = Layout.of(self._function, self._owner._module.variables, self._owner.numbers)
            self._layout.kernels = frozenset(self._owner._module.kernels)
        return self._layout

    @property
    def static_shared(self) -> int:
        """Bytes of shared memory that the kernel declares."""
        return self.layout.static_shared

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of a thread."""
        return self.layout.local_bytes

    @property
    def source_file(self) -> str:
        """The CUDA source file, empty if the PTX does not say."""
        location = next((i.location for i in self._declared.instructions if i.location), None)
        return self._owner._module.files.get(location.file, "") if location else ""

    @cached_property
    def system_calls(self) -> frozenset[str]:
        """The functions of the system that it calls, such as ``"vprintf"``."""
        calls = (i for i in self._function.instructions if i.opcode == "call")
        named = (o.name for i in calls for o in i.operands[:2] if isinstance(o, Symbol))
        return frozenset(named) & SYSTEM.keys()

    def where(self, instruction: Instruction) -> SourceLine | None:
        """Return the line of an instruction in the CUDA source, None if the PTX does not say."""
        location = instruction.location
        if location is None:
            return None
        file = self._owner._module.files.get(location.file, "?")
        if os.path.isdir(os.path.dirname(file)) and not os.path.exists(file):
            # NVRTC puts the working directory in front of the names of programs that are not in files.
            file = os.path.basename(file)
        return SourceLine(file, location.line)

    def source_of(self, line: int) -> SourceLine:
        """Return the line of the CUDA source for a line of the PTX, that line itself if the PTX does not say."""
        at = next((i for i in self._function.instructions if i.line == line), None)
        return (self.where(at) if at else None) or SourceLine("", line)

    def pointers_at(self, line: int, params: bytes) -> tuple[int, ...]:
        """Return the arguments that an address may be computed from, which is accessed at a line of the PTX.

        `params` are the packed arguments. Without a line, all that the kernel takes for pointers.
        """
        try:
            return pointers_at(self._owner._module, self.name, line, params)
        except PtxError:
            return ()

    def follows_pointers(self, params: bytes, find_allocation: Callable[[int], tuple[int, int] | None]) -> bool:
        """Return whether a launch may access memory of `find_allocation` that no argument points to.

        It is inferred from the PTX (:func:`cudatool.ptx.accesses_of_launch`). `params` are the packed arguments.
        """
        try:
            if self._accesses is None:
                self._accesses = infer_accesses(self._owner._module, self.name)
            if not self._accesses.may_find_pointers:
                return False
            return accesses_of_launch(self._accesses, params, find_allocation).unknown
        except PtxError:
            return True

    # ---- translating ----

    def prepare(self, instrument: Instrument = Instrument.NONE, *, optimized: bool = True) -> None:
        """Translate the kernel, or fetch its native code from the cache.

        Parameters
        ----------
        instrument
            Prepare the variant that is instrumented for these.
        optimized
            Prepare code that takes long to compile and runs fast.

        Raises
        ------
        UnsupportedInstruction
            The kernel uses an instruction that the software device does not have.
        PtxError
            The kernel cannot be translated for another reason.
        """
        self._translate(_Variant(instrument, optimized))

    def _translate(self, variant: _Variant) -> _Translated:
        found = self._variants.get(variant)
        if found is not None:
            return found
        module = self._owner._module
        used = [self._declared, *(function for function in module.functions.values() if not function.is_kernel)]
        texts = [f"{function.line} {function.text}" for function in used]  # native code names lines of the PTX
        instrument, optimized, large_grid, needless = variant
        form = f"{int(instrument)}, optimized={optimized}, large_grid={large_grid}, needless={sorted(needless)}"
        key = native.cache_key(module.preamble, *texts, form)
        cache = self._owner.cache
        data = None if cache is None else cache.get(key)
        if data is None:
            made = self._generate(variant)
            facts = struct.pack("<Q???5x", made.slot_bytes, made.parks, made.counts, made.in_step)
            data = facts + self._compiled(made, variant)
            if cache is not None:
                cache.put(key, data)
        translated = _Translated(native.load_object(data[16:]), *struct.unpack_from("<Q???", data))
        # Another thread may have been faster: a plan that has its code has only an address, and this must stay mapped.
        return self._variants.setdefault(variant, translated)

    def llvm_ir(self, instrument: Instrument = Instrument.NONE) -> str:
        """Return what :meth:`prepare` has LLVM optimize and compile, without doing either. Raises as it does."""
        return self._generate(_Variant(instrument, optimized=True)).text

    def _compiled(self, made: Native, variant: _Variant) -> bytes:
        try:
            return native.compile_text(made.text, optimized=variant.optimized)
        except native.CompileError:
            pass
        marked = self._generate(variant, marked=True).text
        try:  # again, to see which instruction it is
            return native.compile_text(marked, optimized=variant.optimized)
        except native.CompileError as error:
            before = marked.split("\n")[: error.line]
            # What is wrong outside of the functions of the kernel's threads has no mark above it in its function.
            inside = next((text for text in reversed(before) if text.startswith((MARK, "define", "}"))), "")
            line, what = 0, "the kernel"
            if inside.startswith(MARK):
                number, _, what = inside.removeprefix(MARK).partition(" ")
                line = int(number)
            raise self._located(UntranslatedInstruction(what, self.name, None, line, error.reason)) from None

    def _generate(self, variant: _Variant, *, marked: bool = False) -> Native:
        try:
            return generate(
                self._stepping if variant.instrument else self._plain,
                self.layout,
                instrument=variant.instrument,
                large_grid=variant.large_grid,
                needless=variant.needless,
                counts_rounds=not variant.optimized,
                marked=marked,
            )
        except UnsupportedInstruction as error:
            raise self._located(error) from None

    def _located(self, error: UnsupportedInstruction) -> UnsupportedInstruction:
        at = next((i for i in self._function.instructions if i.line == error.line), None)
        return error.at(self.name, self.where(at) if at else None)

    # ---- running ----

    def launch(
        self,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: int,
        threads: int = 1,
        seed: int | None = None,
        footprint: Footprint | None = None,
        shadow: Shadow | None = None,
        host: HostPlaces | None = None,
        heap: int = 0,
        stack_bytes: int = 1024,
        cooperative: bool = False,
        timeout_s: float = 0,
        optimized: bool = True,
    ) -> list[Found]:
        """Run the kernel to its end.

        Parameters
        ----------
        shared_bytes
            Dynamic shared memory.
        params
            Address of the packed parameters, in the device's layout.
        threads
            Host threads that run blocks. One gives the same order of everything each time.
        seed
            Permutes the order in which blocks run.
        footprint
            Filled with what the kernel accesses.
        shadow
            What the checkers know of memory; they check the kernel. When races are looked for it runs on one thread.
        host
            The host memory that the kernel may access.
        heap
            Of ``malloc`` in kernels; 0 for none.
        stack_bytes
            Stack of a thread, for calls that cannot be inlined; at most :data:`MAX_STACK`.
        cooperative
            All blocks run at the same time and may synchronize with each other.
        timeout_s
            Longest time that it may take, 0 for any.
        optimized
            Run code that takes long to compile and runs fast. Other code gives the same results, unless threads of the
            kernel race with each other.

        Returns
        -------
        What the checkers found.

        Raises
        ------
        KernelFault, KernelTrap, KernelAssert, KernelDeadlock, KernelTimeout
            The kernel did not run to its end; memory holds what it wrote until then, and the error what was found.
        """
        if (
            footprint is None
            and shadow is None
            and seed is None
            and not timeout_s
            and not cooperative
            and (plan := self.plan(grid, block, shared_bytes, threads, heap, stack_bytes, optimized)) is not None
        ):
            self.launch_planned(plan, params)
            return []
        large = _is_large(grid, block)
        instrument = Instrument.FOOTPRINT if footprint is not None else Instrument.NONE
        if shadow is not None:
            instrument |= shadow.kinds
            threads = 1 if instrument & Instrument.RACECHECK else threads
        optimized |= large
        how = _Checked(instrument, Needless(), None, (), fills=True)
        if shadow is not None and instrument & ~Instrument.SYNCCHECK:
            how = self._find_checked(grid, block, shared_bytes, params, _Variant(instrument, optimized, large), shadow)
        translated = self._translate(_Variant(how.kinds, optimized, large, how.left_out))
        workspace = (ctypes.c_uint32 * 16)()
        places = HostPlaces({}) if host is None else host
        if cooperative:  # its blocks synchronize by memory that the driver gives it
            places.add_unwatched(ctypes.addressof(workspace), ctypes.sizeof(workspace))
        launch = replace(
            self._described(translated, grid, block, shared_bytes, heap, stack_bytes),
            params=params,
            cooperative=cooperative,
            workspace=ctypes.addressof(workspace) if cooperative else 0,
            timeout_s=timeout_s,
            host=places,
        )
        checked: list[Launching] = []
        order = Order(self._acquires, self._is_plain, programs=PROGRAMS in self._function.pragmas)

        def watch(contexts: list[Context]) -> None:
            if shadow is not None:
                checked.append(shadow.prepare(contexts, self._lines, places, order, how.written, how.sound))

        try:
            stopped = run(launch, threads, seed, footprint, watch)
            if stopped is not None:
                raise self._explain(stopped, self._stepping if how.kinds else self._plain)
        except KernelError as error:
            error.found = [found for launching in checked for found in launching.found()]
            raise
        finally:
            if shadow is not None and (how.fills or self._uses_heap):
                shadow.changed()
        return [found for launching in checked for found in launching.found()]

    def _find_checked(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: int,
        variant: _Variant,
        shadow: Shadow,
    ) -> _Checked:
        """Return how a launch is checked: found once for launches that are alike while memory is as it was.

        `variant` is its code if no check is left out.
        """
        instrument = variant.instrument
        arguments = ctypes.string_at(params, self.layout.param_bytes)
        key = shadow.version, arguments, grid, block, shared_bytes, variant
        if (known := self._checked.get(key)) is not None:
            return known
        device = range(shadow.base, shadow.base + shadow.size)
        of_launch = self._independent.of_launch(arguments, grid, block, device, self._address_of)
        left_out = needless(of_launch, instrument, shadow, self._shared_bytes(shared_bytes))
        is_plain = self._independent.leaves_nothing(instrument, left_out)
        if not is_plain:
            left_out = self._translated_for(variant, left_out)
        around, sound = self._argument_ranges, tuple[tuple[int, int], ...]()
        if any((kind, line) not in left_out for kind in _MEMORY & instrument for line in around.of_line):
            sound = tuple(shadow.sound_around(pointer) for pointer in around.addresses(arguments))
        fills = bool(instrument & Instrument.INITCHECK) and self._independent.may_write(
            {line for check, line in left_out if check is Instrument.INITCHECK}
        )
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        code = (Instrument.NONE, Needless()) if is_plain else (instrument, left_out)
        found = self._checked[key] = _Checked(*code, of_launch.written, sound, fills=fills)
        return found

    def plan(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        threads: int,
        heap: int,
        stack_bytes: int,
        optimized: bool,
    ) -> Plan | None:
        """Return what plain launches of this shape need, found out once so that small ones cost little.

        None if no launch of this shape is so plain.
        """
        key = grid, block, shared_bytes, threads, heap, stack_bytes, optimized
        try:
            return self._plans[key]
        except KeyError:
            plan = self._plans[key] = self._plan(*key)
            return plan

    def launch_planned(self, plan: Plan, params: int) -> None:
        """Do as :meth:`launch` in the plainest case."""
        if (stopped := run_plain(plan, params)) is not None:
            raise self._explain(stopped, self._plain)

    def explain(self, team: Team) -> None:
        """Raise what ended a planned launch early, which the team has run."""
        if (stopped := why_ended(team)) is not None:
            raise self._explain(stopped, self._plain)

    def _shared_bytes(self, dynamic: int) -> int:
        """Return the shared memory of a block that is launched with so many bytes of dynamic shared memory.

        Compilers widen loads to aligned 16 bytes: what lies there is a block's too, as a GPU gives it out.
        """
        return self.layout.dynamic_offset + (dynamic + 15) // 16 * 16

    def _described(
        self,
        translated: _Translated,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        heap: int,
        stack_bytes: int,
    ) -> NativeLaunch:
        """Return what a launch needs, but for its arguments."""
        return NativeLaunch(
            entry=translated.code.entry,
            grid=grid,
            block=block,
            params=0,
            table=ctypes.addressof(self._owner.table),
            shared_bytes=self._shared_bytes(shared_bytes),
            dynamic_bytes=shared_bytes,
            local_bytes=self.layout.local_bytes,
            slot_bytes=translated.slot_bytes,
            heap=heap,
            stack_bytes=min(stack_bytes, MAX_STACK),
            parks=translated.parks,
            rounds=self._rounds if translated.counts else None,
            steps=translated.steps,
        )

    def _plan(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        threads: int,
        heap: int,
        stack_bytes: int,
        optimized: bool,
    ) -> Plan | None:
        """Return what launches of this shape need, None if :func:`run_plain` is not for them."""
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        if _is_large(grid, block):
            return None
        translated = self._translate(_Variant(Instrument.NONE, optimized))
        if translated.parks:
            return None
        plan = self._described(translated, grid, block, shared_bytes, heap, stack_bytes)
        return Plan(plan, workers_for(grid, block, threads), optimized)

    @cached_property
    def _acquires(self) -> bool:
        """Whether threads may learn, by flags, what was done in other blocks."""
        orders = {"acquire", "acq_rel"}
        return any(
            opcode_of(i.opcode).is_fence or (i.opcode != "mbarrier" and orders.intersection(i.modifiers))
            for i in self._function.instructions
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether nothing but barriers of the whole block orders threads."""
        return not self._acquires and self._has_plain_barriers

    @cached_property
    def _independent(self) -> Independent:
        return Independent(self._function, self.layout.param_offsets, plain=self._is_plain)

    @cached_property
    def _argument_ranges(self) -> ArgumentRanges:
        return ArgumentRanges.of(self._function, self.layout.param_offsets)

    def _address_of(self, symbol: Symbol) -> int | None:
        """Return the address of a variable in device memory, or where it lies in shared memory."""
        if symbol.name in self.layout.shared:
            return self.layout.shared[symbol.name] + symbol.offset
        if symbol.name in self.layout.globals:
            return self._owner.table[self.layout.globals[symbol.name]] + symbol.offset
        return None

    def _translated_for(self, variant: _Variant, left_out: Needless) -> Needless:
        """Return which checks are left out by code that there is, or for which there is room."""
        made = [
            known.needless for known in list(self._variants) if known._replace(needless=variant.needless) == variant
        ]
        if left_out in made or len(made) < _MAX_VARIANTS:
            return left_out
        return max((known for known in made if known <= left_out), key=len, default=Needless())

    @cached_property
    def _has_plain_barriers(self) -> bool:
        """Whether nothing but barriers of the whole block orders the threads of a block."""
        for i in self._function.instructions:
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

    @cached_property
    def _uses_heap(self) -> bool:
        """Whether it allocates memory or frees it."""
        return bool(self.system_calls & {"malloc", "free"})

    @cached_property
    def _lines(self) -> int:
        return 1 + max((instruction.line for instruction in self._function.instructions), default=0)

    def _explain(self, stopped: Stopped, code: Function) -> KernelError:
        context, reason = stopped.context, stopped.reason
        if reason == Stop.ASSERT:
            return KernelAssert(f"{kernel_name(self.name)}: {take_message(context)}")
        if reason in (Stop.DEADLOCK, Stop.STALLED):
            waiting = "; ".join(self._who_waits(block, waits, code) for block, waits in stopped.waiting)
            return KernelDeadlock(f"{kernel_name(self.name)}: no thread can go on: {waiting}")
        if reason == Stop.TIMEOUT:
            block, waits = stopped.waiting[0]
            place = f"; {self._who_waits(block, waits, code)}" if context.parked and waits else f" in block {block}"
            return KernelTimeout(f"{kernel_name(self.name)}: ended after the time that sim:timeout allows{place}")
        at = context.at_x, context.at_y, context.at_z
        who = f"{kernel_name(self.name)}: block {at}, thread {context.at_thread}"
        source = self.source_of(context.site)
        if reason == Stop.STACK_OVERFLOW:
            return KernelStackOverflow(
                f"{who}: calls need more than the {context.stack_bytes} bytes of CU_LIMIT_STACK_SIZE, at {source}"
            )
        if reason == Stop.BAD_FREE:
            return KernelTrap(f"{who}: free of an address that is not a live block of the device's heap, at {source}")
        return KernelTrap(f"{who}: trap at {source}")

    def _who_waits(self, block: tuple[int, int, int], waits: list[Wait], code: Function) -> str:
        """Return in words where the threads of a block wait."""
        suspensions = [i for i in code.instructions if suspension_of(i) is not None]
        places: dict[str, list[int]] = {}
        for wait in waits:
            at = suspensions[wait.suspension - 1]
            places.setdefault(self._what_waits(at, wait), []).append(wait.thread)
        said = ", ".join(f"{_thread_ranges(threads)} {place}" for place, threads in places.items())
        return f"block {block}: {said}"

    def _what_waits(self, at: Instruction, wait: Wait) -> str:
        row = suspension_of(at)
        assert row is not None
        place = self.where(at) or SourceLine("", at.line)
        if row.kind == Kind.YIELD:
            return f"in a loop that waits for memory to change ({place})"
        what = ""
        if row.kind == Kind.WARP:
            what = f", mask {wait.mask:#010x}"
        elif row.kind in (Kind.BARRIER, Kind.BARRIER_REDUCE):
            what = f", barrier {wait.number}" + (f", {wait.count} threads" if wait.count else "")
        return f"at {at.name}{what} ({place})"


def _is_large(grid: tuple[int, int, int], block: tuple[int, int, int]) -> bool:
    """Whether 32 bits do not number the threads along an axis."""
    return any(blocks * threads > 2**31 for blocks, threads in zip(grid, block, strict=True))


def _thread_ranges(threads: list[int]) -> str:
    """Return ``"threads 0-3, 7"`` in words: the first few runs of numbers."""
    runs: list[list[int]] = []
    for thread in threads:
        if runs and thread == runs[-1][1] + 1:
            runs[-1][1] = thread
        else:
            runs.append([thread, thread])
    said = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:4])
    more = f" and {len(runs) - 4} more ranges" if len(runs) > 4 else ""
    return f"thread{'s' if len(threads) > 1 else ''} {said}{more}"
