"""A kernel that can be launched."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cudatool.ptx import Function, KernelAccesses, PtxError, accesses_of_launch, infer_accesses, pointers_at
from cudatool.sim.jit.checked_launches import Checked, CheckedLaunches
from cudatool.sim.jit.context import MAX_THREADS, Context
from cudatool.sim.jit.endings import explain
from cudatool.sim.jit.footprint import Footprint
from cudatool.sim.jit.host_places import HostPlaces
from cudatool.sim.jit.instrument import Instrument, Needless
from cudatool.sim.jit.kernel_text import MAX_STACK, Image, KernelText
from cudatool.sim.jit.launch import KernelError, NativeLaunch, run, workers_for
from cudatool.sim.jit.layout import Layout
from cudatool.sim.jit.team import Plan, Team, run_plain, why_ended
from cudatool.sim.jit.translation import Translated, Translation, Variant
from cudatool.sim.optimizing import ENOUGH
from cudatool.source_text import SourceLine

if TYPE_CHECKING:
    from cudatool.sim.jit.shadow import Found, Launching, Shadow

__all__ = ["JitKernel", "Param"]

_MOST_PLANS = 256  # shapes of launches that a kernel keeps what they need for


@dataclass(frozen=True, slots=True)
class Param:
    """A kernel parameter: where it lies in the packed buffer, bytes. `is_pointer` is what ``.ptr`` says, a hint."""

    offset: int
    size: int
    align: int
    is_pointer: bool


class JitKernel:
    """A kernel of a :class:`.JitModule`.

    Attributes
    ----------
    name
        As PTX spells it.
    params, param_bytes, param_layout
        Its parameters and the size of the packed buffer that holds them.
    max_threads
        Of a block.
    text
        Its PTX.
    translation
        Its native code.
    checks
        How its launches are checked.
    """

    def __init__(self, image: Image, function: Function) -> None:
        self.text = KernelText(image, function)
        self.translation = Translation(self.text)
        self.checks = CheckedLaunches(self.text, self.translation)
        self._rounds = ctypes.c_uint64()
        self._accesses: KernelAccesses | None = None
        self._plans: dict[tuple[object, ...], Plan | None] = {}
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
    def layout(self) -> Layout:
        """Where the kernel's variables lie."""
        return self.text.layout

    @property
    def static_shared(self) -> int:
        """Bytes of shared memory that the kernel declares."""
        return self.text.layout.static_shared

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of a thread."""
        return self.text.layout.local_bytes

    @property
    def system_calls(self) -> frozenset[str]:
        """The functions of the system that it calls, such as ``"vprintf"``."""
        return self.text.system_calls

    def source_of(self, line: int) -> SourceLine:
        """Return the line of the CUDA source for a line of the PTX, that line itself if the PTX does not say."""
        return self.text.source_of(line)

    def pointers_at(self, line: int, params: bytes) -> tuple[int, ...]:
        """Return the arguments that an address may be computed from, which is accessed at a line of the PTX.

        `params` are the packed arguments. Without a line, all that the kernel takes for pointers.
        """
        try:
            return pointers_at(self.text.image.ptx, self.name, line, params)
        except PtxError:
            return ()

    def follows_pointers(self, params: bytes, find_allocation: Callable[[int], tuple[int, int] | None]) -> bool:
        """Return whether a launch may access memory of `find_allocation` that no argument points to.

        It is inferred from the PTX (:func:`cudatool.ptx.accesses_of_launch`). `params` are the packed arguments.
        """
        try:
            if self._accesses is None:
                self._accesses = infer_accesses(self.text.image.ptx, self.name)
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
        self.translation.code(Variant(instrument, optimized))

    def llvm_ir(self, instrument: Instrument = Instrument.NONE) -> str:
        """Return what :meth:`prepare` has LLVM optimize and compile, without doing either. Raises as it does."""
        return self.translation.generate(Variant(instrument, optimized=True)).text

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
        how = Checked(instrument, Needless(), None, (), fills=True)
        if shadow is not None and instrument & ~Instrument.SYNCCHECK:
            how = self.checks.find(grid, block, shared_bytes, params, Variant(instrument, optimized, large), shadow)
        translated = self.translation.code(Variant(how.kinds, optimized, large, how.left_out))
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

        def watch(contexts: list[Context]) -> None:
            if shadow is not None:
                order, lines = self.checks.order, self.text.lines
                checked.append(shadow.prepare(contexts, lines, places, order, how.written, how.sound))

        try:
            stopped = run(launch, threads, seed, footprint, watch)
            if stopped is not None:
                raise explain(stopped, self.text, self.text.stepping if how.kinds else self.text.plain)
        except KernelError as error:
            error.found = [found for launching in checked for found in launching.found()]
            raise
        finally:
            if shadow is not None and (how.fills or self.checks.uses_heap):
                shadow.changed()
        return [found for launching in checked for found in launching.found()]

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
        """Do as :meth:`launch` in the plainest case.

        If that is much work, which shows in code that is not optimized, optimized code runs the blocks that are left.
        """
        stopped, begun = run_plain(plan, params)
        launch = plan.launch
        if stopped is None and launch.most_rounds is not None and begun < math.prod(launch.grid):
            shape = launch.grid, launch.block, launch.dynamic_bytes, plan.threads, launch.heap, launch.stack_bytes
            rest = self.plan(*shape, optimized=True)
            assert rest is not None  # what parks or is large is so in any code
            stopped, _ = run_plain(rest, params, begun)
        if stopped is not None:
            raise explain(stopped, self.text, self.text.plain)

    def explain(self, team: Team) -> None:
        """Raise what ended a planned launch early, which the team has run."""
        if (stopped := why_ended(team)) is not None:
            raise explain(stopped, self.text, self.text.plain)

    def _described(
        self,
        translated: Translated,
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
            table=ctypes.addressof(self.text.image.table),
            shared_bytes=self.text.shared_bytes(shared_bytes),
            dynamic_bytes=shared_bytes,
            local_bytes=self.text.layout.local_bytes,
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
        translated = self.translation.code(Variant(Instrument.NONE, optimized))
        if translated.parks:
            return None
        plan = self._described(translated, grid, block, shared_bytes, heap, stack_bytes)
        if plan.rounds is not None:
            plan = replace(plan, most_rounds=ENOUGH // len(self.text.declared.instructions))
        return Plan(plan, workers_for(grid, block, threads), optimized)


def _is_large(grid: tuple[int, int, int], block: tuple[int, int, int]) -> bool:
    """Whether 32 bits do not number the threads along an axis."""
    return any(blocks * threads > 2**31 for blocks, threads in zip(grid, block, strict=True))
