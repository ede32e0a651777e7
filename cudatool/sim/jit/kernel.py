"""A kernel that can be launched."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from cudatool import ptx
from cudatool.loading.whole_imports import whole_imports
from cudatool.ptx.errors import PtxError
from cudatool.sim.jit.context import MAX_STACK, Context, block_shared_bytes
from cudatool.sim.jit.host_places import HostPlaces
from cudatool.sim.jit.image import Image
from cudatool.sim.jit.instrument import Checked, Instrument, Needless
from cudatool.sim.jit.launch import KernelError, NativeLaunch, Stopped, run, workers_for
from cudatool.sim.jit.launch_options import LaunchOptions, LaunchShape
from cudatool.sim.jit.source import DeclaredKernel, Sizes
from cudatool.sim.jit.team import Team, TeamPlan, run_plain, why_ended
from cudatool.sim.jit.translation import Translated, Translation, Variant
from cudatool.sim.optimizing import enough
from cudatool.source_text import SourceLine

if TYPE_CHECKING:
    from cudatool.sim.jit.checked_launches import CheckedLaunches
    from cudatool.sim.jit.kernel_text import KernelText
    from cudatool.sim.jit.layout import Layout
    from cudatool.sim.jit.shadow import Found, Launching

__all__ = ["JitKernel"]

_MOST_PLANS = 256  # shapes of launches that a kernel keeps what they need for
_PLAINLY = LaunchOptions()


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
    translation
        Its native code.
    """

    def __init__(self, image: Image, name: str, declared: DeclaredKernel) -> None:
        self._image = image
        self._declared = declared
        self.translation = Translation(declared.digest, lambda: self.text, image.source.cache)
        self._rounds, self._spent = ctypes.c_uint64(), ctypes.c_uint64()
        self._accesses: ptx.KernelAccesses | None = None
        self._plans: dict[tuple[LaunchShape, int, bool], TeamPlan | None] = {}
        self._enough: dict[Instrument, int] = {}
        self._noted: set[Instrument] = set()
        self.name = name
        self.params = declared.params
        self.param_bytes = max((one.offset + one.size for one in self.params), default=0)
        self.param_layout = b"".join(struct.pack("II", one.offset, one.size) for one in self.params)
        self.max_threads = declared.max_threads

    @property
    def rounds(self) -> int:
        """How often threads went back to the beginning of a loop, so far, in code that is not optimized."""
        return self._rounds.value

    @property
    def spent(self) -> int:
        """The ns that launches took so far in code that is not optimized."""
        return self._spent.value

    def enough(self, instrument: Instrument = Instrument.NONE) -> int:
        """Return the work of launches from which on such code of it is optimized: see :mod:`cudatool.sim.optimizing`.

        Found out once: what other processes optimize meanwhile makes no difference.
        """
        try:
            return self._enough[instrument]
        except KeyError:
            is_kept = self.translation.was_optimized(instrument)
            found = self._enough[instrument] = enough(self._declared.instructions, is_kept=is_kept)
            return found

    def note_work(self, instrument: Instrument = Instrument.NONE) -> None:
        """Note for later processes that launches were a part of :meth:`enough` (:meth:`.Optimizing.is_part`)."""
        if instrument not in self._noted:
            self._noted.add(instrument)
            self.translation.expect(instrument)

    # ---- what is known without its PTX, if it was looked at before ----

    @cached_property
    def sizes(self) -> Sizes:
        """What a launch needs to know of its code.

        Raises
        ------
        PtxError
            It has calls that cannot be followed.
        """
        return Sizes(*self._image.source.kept("sizes", self._declared.digest, self._sizes))

    def _sizes(self) -> Sizes:
        layout, calls = self.text.layout, self.text.system_calls
        return Sizes(layout.static_shared, layout.dynamic_offset, layout.local_bytes, sorted(calls))

    @property
    def static_shared(self) -> int:
        """Bytes of shared memory that the kernel declares."""
        return self.sizes.static_shared

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of a thread."""
        return self.sizes.local_bytes

    @cached_property
    def system_calls(self) -> frozenset[str]:
        """The functions of the system that it calls, such as ``"vprintf"``."""
        return frozenset(self.sizes.system_calls)

    # ---- what is known of its PTX without translating ----

    @cached_property
    def text(self) -> KernelText:
        """Its PTX."""
        with whole_imports():
            from cudatool.sim.jit.kernel_text import KernelText  # takes a while to load, with all that reads PTX

        return KernelText(self._image, self._image.ptx.kernels[self.name])

    @cached_property
    def checks(self) -> CheckedLaunches:
        """How its launches are checked."""
        with whole_imports():
            from cudatool.sim.jit.checked_launches import CheckedLaunches  # only a run under the sanitizer asks

        return CheckedLaunches(self.text, self.translation)

    @property
    def layout(self) -> Layout:
        """Where the kernel's variables lie."""
        return self.text.layout

    def source_of(self, line: int) -> SourceLine:
        """Return the line of the CUDA source for a line of the PTX, that line itself if the PTX does not say."""
        return self.text.source_of(line)

    def pointers_at(self, line: int, params: bytes) -> tuple[int, ...]:
        """Return the arguments that an address may be computed from, which is accessed at a line of the PTX.

        `params` are the packed arguments. Without a line, all that the kernel takes for pointers.
        """
        try:
            return ptx.pointers_at(self._image.ptx, self.name, line, params)
        except PtxError:
            return ()

    def follows_pointers(self, params: bytes, find_allocation: Callable[[int], tuple[int, int] | None]) -> bool:
        """Return whether a launch may access memory of `find_allocation` that no argument points to.

        It is inferred from the PTX (:func:`cudatool.ptx.accesses_of_launch`). `params` are the packed arguments.
        """
        try:
            if self._accesses is None:
                self._accesses = ptx.infer_accesses(self._image.ptx, self.name)
            if not self._accesses.may_find_pointers:
                return False
            return ptx.accesses_of_launch(self._accesses, params, find_allocation).unknown
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

    def launch(self, shape: LaunchShape, params: int, options: LaunchOptions = _PLAINLY) -> list[Found]:
        """Run the kernel to its end; return what the checkers found.

        `params` is the address of the packed parameters, in the device's layout.

        Raises
        ------
        KernelFault, KernelTrap, KernelAssert, KernelDeadlock, KernelTimeout
            The kernel did not run to its end; memory holds what it wrote until then, and the error what was found.
        """
        if options.is_plain and (plan := self.plan(shape, options.threads, optimized=options.optimized)) is not None:
            self.launch_planned(plan, params)
            return []
        shadow, threads = options.shadow, options.threads
        instrument = Instrument.FOOTPRINT if options.footprint is not None else Instrument.NONE
        if shadow is not None:
            instrument |= shadow.kinds
            threads = 1 if instrument & Instrument.RACECHECK else threads
        variant = Variant(instrument, options.optimized or shape.is_large, shape.is_large)
        how = Checked(instrument, Needless(), None, (), fills=True)
        if shadow is not None and instrument & ~Instrument.SYNCCHECK:
            how = self.checks.find(shape, params, variant, shadow)
        workspace = (ctypes.c_uint32 * 16)()
        places = HostPlaces({}) if options.host is None else options.host
        if options.cooperative:  # its blocks synchronize by memory that the driver gives it
            places.add_unwatched(ctypes.addressof(workspace), ctypes.sizeof(workspace))
        translated = self.translation.code(variant._replace(instrument=how.kinds, needless=how.left_out))
        launch = self._described(translated, shape, optimized=variant.optimized)._replace(
            params=params,
            cooperative=options.cooperative,
            workspace=ctypes.addressof(workspace) if options.cooperative else 0,
            timeout_s=options.timeout_s,
            host=places,
        )
        checked: list[Launching] = []

        def watch(contexts: list[Context]) -> None:
            if shadow is not None:
                order, lines = self.checks.order, self.text.lines
                checked.append(shadow.prepare(contexts, lines, places, order, how.written, how.sound))

        try:
            stopped = run(launch, threads, options.seed, options.footprint, watch)
            if stopped is not None:
                raise self._explained(stopped, as_checked=bool(how.kinds))
        except KernelError as error:
            error.found = [found for launching in checked for found in launching.found()]
            raise
        finally:
            if shadow is not None and (how.fills or self.checks.uses_heap):
                shadow.changed()
        return [found for launching in checked for found in launching.found()]

    def plan(self, shape: LaunchShape, threads: int, *, optimized: bool) -> TeamPlan | None:
        """Return what plain launches of this shape need, found out once so that small ones cost little.

        None if no launch of this shape is so plain. `threads` and `optimized` are those of :class:`.LaunchOptions`.
        """
        key = shape, threads, optimized
        try:
            return self._plans[key]
        except KeyError:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(shape, threads, optimized=optimized)
            return plan

    def launch_planned(self, plan: TeamPlan, params: int) -> None:
        """Do as :meth:`launch` in the plainest case.

        If that is much work, which shows in code that is not optimized, optimized code runs the blocks that are left.
        """
        stopped, begun = run_plain(plan, params)
        launch = plan.launch
        if stopped is None and launch.most_rounds is not None and begun < math.prod(launch.grid):
            rest = self.plan(plan.shape, plan.threads, optimized=True)
            assert rest is not None  # what parks or is large is so in any code
            stopped, _ = run_plain(rest, params, begun)
        if stopped is not None:
            raise self._explained(stopped)

    def explain(self, team: Team) -> None:
        """Raise what ended a planned launch early, which the team has run."""
        if (stopped := why_ended(team)) is not None:
            raise self._explained(stopped)

    def _explained(self, stopped: Stopped, *, as_checked: bool = False) -> KernelError:
        """Return the error that says why a launch ended early."""
        with whole_imports():
            from cudatool.sim.jit.endings import explain  # few launches do

        return explain(stopped, self.text, self.text.stepping if as_checked else self.text.plain)

    def _described(self, translated: Translated, shape: LaunchShape, *, optimized: bool) -> NativeLaunch:
        """Return what a launch needs, but for its arguments."""
        return NativeLaunch(
            entry=translated.code.entry,
            grid=shape.grid,
            block=shape.block,
            params=0,
            table=ctypes.addressof(self._image.table),
            shared_bytes=block_shared_bytes(self.sizes.dynamic_offset, shape.shared_bytes),
            dynamic_bytes=shape.shared_bytes,
            local_bytes=self.sizes.local_bytes,
            slot_bytes=translated.slot_bytes,
            heap=shape.heap,
            stack_bytes=min(shape.stack_bytes, MAX_STACK),
            parks=translated.parks,
            rounds=self._rounds if translated.counts else None,
            spent=None if optimized else self._spent,
            steps=translated.steps,
        )

    def _plan(self, shape: LaunchShape, threads: int, *, optimized: bool) -> TeamPlan | None:
        """Return what launches of this shape need, None if :func:`run_plain` is not for them."""
        if shape.is_large:
            return None
        translated = self.translation.code(Variant(Instrument.NONE, optimized))
        if translated.parks:
            return None
        launch = self._described(translated, shape, optimized=optimized)
        if launch.rounds is not None:
            launch = launch._replace(most_rounds=self.enough() // self._declared.instructions)
        return TeamPlan(launch, shape, workers_for(shape.grid, shape.block, threads), optimized)
