"""The checkers of the software device: what memory a kernel may use, what it did wrong, and who it was.

They are compiled into kernels on request (:mod:`cudatool.sim.jit.instrument`). This module keeps their maps up to date
as memory comes and goes, keeps freed memory out of use for a while, and puts what they found into words.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Final

from cudatool.config import KERNEL_CHECKS
from cudatool.loading.late_dataclasses import dataclass
from cudatool.ptx.kernel_names import kernel_name
from cudatool.sim import abi, jit
from cudatool.sim.addresses import place_of, pointer_behind
from cudatool.sim.allocations import Allocation
from cudatool.sim.arena import READ_ONLY
from cudatool.sim.jit import DefectCode, Instrument, RaceReason
from cudatool.units import format_bytes

if TYPE_CHECKING:
    from cudatool.sim.jit import Found, JitKernel, KernelError
    from cudatool.sim.machine import Machine
    from cudatool.sim.queue import Operation
    from cudatool.source_text import SourceLine

__all__ = ["CheckFinding", "Checkers"]

_QUARANTINE: Final = 64 << 20  # bytes of freed memory that are not given out again
_OWNED: Final = ("device", "pool")  # kinds of allocations whose memory can be held back
_FRESH: Final = (*_OWNED, "array")  # kinds in which nothing has a value before the program writes it

_KINDS: Final = {check: Instrument[check.upper()] for check in KERNEL_CHECKS}

# By a `sim.jit.DefectCode`'s name: the check, the kind of finding, and what is wrong where that needs no more looking.
_DEFECTS: Final = {
    "INVALID": ("memcheck", "out-of-bounds", ""),
    "MISALIGNED": ("memcheck", "misaligned", "the address is not a multiple of {size}"),
    "UNINITIALIZED": ("initcheck", "uninitialized", "nothing was written there since the memory was allocated"),
    "READ_AFTER_WRITE": ("racecheck", "kernel-race", ""),
    "WRITE_AFTER_READ": ("racecheck", "kernel-race", ""),
    "WRITE_AFTER_WRITE": ("racecheck", "kernel-race", ""),
    "BARRIER_DIVERGED": ("synccheck", "barrier-divergence", "not all threads of the block come to this barrier"),
    "MASK_WITHOUT_CALLER": ("synccheck", "bad-mask", "the member mask lacks a thread that executes the operation"),
    "ABSENT_LANE": (
        "synccheck",
        "absent-lane",
        "this lane takes the value of a lane that has ended or that the block does not have: it may be anything",
    ),
    "PART_OF_WARP": (
        "synccheck",
        "absent-lane",
        "this is an operation of a whole warp, of which a lane has ended or that the block does not have",
    ),
    "STALE_READ": ("racecheck", "stale-read", ""),
    "CAS_GUESS": ("racecheck", "cas-guess", ""),
    "UNCHECKED": (
        "racecheck",
        "unchecked",
        "racecheck looked at a part of {kernel} only: its accesses would take more than {history_limit} to remember",
    ),
    "IN_STEP": (
        "racecheck",
        "in-step",
        "lanes of a warp in {kernel} read shared memory that another lane writes, with no __syncwarp() between: "
        "{own} and {other}",
    ),
}

_STRONG: Final = {
    "": "",
    "read": "a volatile read",
    "write": "a volatile write",
    "atomic": "an atomic update",
}
_GUESS: Final = (
    "by the memory model this is a race, as the plain read and the other thread's atomic update are in no order; it "
    "changes no result, because the value read is only compared by atomicCAS. An atomic read makes it none: "
    "cuda::atomic_ref<T, cuda::thread_scope_device>(*p).load(cuda::memory_order_relaxed), or a volatile one"
)


@dataclass(frozen=True)
class CheckFinding:
    """What a checker found, in one launch or call. `count` is how often; the rest is about the first time.

    Attributes
    ----------
    check
        One of :data:`~cudatool.config.KERNEL_CHECKS`.
    kind
        ``"out-of-bounds"``, ``"use-after-free"``, ``"host-pointer"``, ``"peer-access"``, ``"read-only"``,
        ``"misaligned"``, ``"uninitialized"``, ``"kernel-race"``, ``"stale-read"``, ``"cas-guess"``,
        ``"barrier-divergence"``, ``"bad-mask"``, ``"absent-lane"``, ``"invalid-free"``, ``"double-free"``,
        ``"invalid-copy"`` or ``"kernel-error"``;
        ``"unchecked"`` for a launch of which racecheck looked at a part, ``"in-step"`` for one with volatile accesses
        that only warps in step would order, ``"unmeasured"`` for one whose accesses are not all known.
    mode
        ``"read"``, ``"write"``, ``"atomic"`` or empty.
    space, address, size
        ``"global"``, ``"shared"`` or ``"local"``; the address (an offset in the latter two) and bytes of the access.
    kernel, block, thread, source
        Who: name, coordinates, and the line of the CUDA source or of the PTX; None if no thread did it.
    text
        One sentence that says what is wrong with the address.
    other_block, other_thread, other_source
        The earlier access of a race, or the write of what is read.
    pointer
        The argument of the kernel that the address was computed from; 0 if that is not certain.
    usable
        Bytes of the access that were in memory that the kernel could use when it ran: the access crosses an end.
    """

    check: str
    kind: str
    text: str
    mode: str = ""
    space: str = ""
    address: int = 0
    size: int = 0
    kernel: str = ""
    block: tuple[int, ...] = ()
    thread: tuple[int, ...] = ()
    source: SourceLine | None = None
    count: int = 1
    other_block: tuple[int, ...] = ()
    other_thread: tuple[int, ...] = ()
    other_source: SourceLine | None = None
    pointer: int = 0
    usable: int = 0

    @property
    def is_gap(self) -> bool:
        """Whether this says that something was not checked, rather than that something is wrong."""
        return self.kind in ("unchecked", "in-step", "unmeasured")


class Checkers:
    """The checkers that are on, from when they are made.

    Parameters
    ----------
    machine
        Whose memory and kernels are checked.
    checks
        Of :data:`~cudatool.config.KERNEL_CHECKS`.
    """

    def __init__(self, machine: Machine, checks: Iterable[str]) -> None:
        self._machine = machine
        kinds = _instrument(checks)
        if machine.shadow is None:
            before = machine.arena.before
            machine.shadow = jit.Shadow(before.start, len(before) + machine.arena.limit, kinds)
        self.shadow = machine.shadow
        self.shadow.reset(kinds)
        self.quarantines = bool(kinds & jit.Instrument.MEMCHECK)
        self._freed: deque[Allocation] = deque(maxlen=4096)  # the last ones, to say whose an address was
        self._held: deque[tuple[int, Callable[[], None]]] = deque()  # size, and what gives the memory back
        self._held_bytes = 0
        self._apart: Sequence[Allocation] = ()  # what the kernel that runs has no access to, though it exists
        for allocation in machine.allocations:
            self.added(allocation)
            if allocation.device >= 0:  # what was written before is not known
                self.shadow.written(allocation.address, allocation.size)
        for _, heap in machine.heaps:
            if heap.handle:  # its context exists
                self.shadow.heap(heap.address, heap.size, heap.blocks())

    def narrow(self, checks: Iterable[str]) -> None:
        """Check kernels only for these of the checks that are on, until the next call.

        Nothing may be pending. initcheck stays on: it must see every write.
        """
        self.shadow.narrow(_instrument(checks))

    # ---- memory (called with the driver's lock held) ----

    def added(self, allocation: Allocation) -> None:
        """Memory can be used from now on."""
        if allocation.device < 0:
            return
        self.shadow.allocated(allocation.address, allocation.size)
        if allocation.variables:
            self.shadow.freed(allocation.address, allocation.size)
        for variable in allocation.variables:
            self.shadow.usable(allocation.address + variable.offset, variable.size)
            if variable.is_constant:
                self.shadow.read_only(allocation.address + variable.offset, variable.size)
        if allocation.kind == "virtual":
            self.protected(allocation)
        if allocation.kind not in _FRESH:  # variables are initialized, and others' memory was written by others
            self.shadow.written(allocation.address, allocation.size)

    def shared(self, allocation: Allocation) -> None:
        """Other processes may write to the memory from now on."""
        self.shadow.written(allocation.address, allocation.size)

    def protected(self, mapping: Allocation) -> None:
        """What may be done with a mapping is what its flags say from now on."""
        if mapping.flags == READ_ONLY:
            self.shadow.read_only(mapping.address, mapping.size)
        else:
            self.shadow.usable(mapping.address, mapping.size)

    def removed(self, allocation: Allocation) -> None:
        """Memory must not be used any more."""
        if allocation.device >= 0:
            self.shadow.freed(allocation.address, allocation.size)
        self._freed.append(copy(allocation))

    def copied(self, operation: Operation, targets: Iterable[int], sources: Iterable[int], width: int) -> None:
        """Rows of `width` bytes were copied. A copy to the host is a read of what it copies."""
        if self._looks_for("memcheck"):
            targets, sources = list(targets), list(sources)
            self._find_beyond(operation, sources, width, "read")
            self._find_beyond(operation, targets, width, "write")
            self._find_overlap(operation, targets, sources, width)
        read = [self.shadow.copied(to, source, width) for to, source in zip(targets, sources, strict=True)]
        count = sum(unwritten for _, unwritten in read)
        if count and self._looks_for("initcheck"):
            operation.findings = [
                *operation.findings,
                CheckFinding(
                    "initcheck",
                    "uninitialized",
                    f"nothing was written to {format_bytes(count)} of what it copies since the memory was allocated",
                    mode="read",
                    space="global",
                    address=next(address for address, unwritten in read if unwritten),
                    size=count,
                    kernel=operation.name,
                ),
            ]

    def filled(self, operation: Operation, targets: Iterable[int], width: int) -> None:
        """Rows of `width` bytes were set to a value."""
        rows = list(targets)
        if self._looks_for("memcheck"):
            self._find_beyond(operation, rows, width, "write")
        for row in rows:
            self.shadow.written(row, width)

    def _find_beyond(self, operation: Operation, rows: Iterable[int], width: int, mode: str) -> None:
        """Report a copy or fill that goes beyond the block of a caching allocator that it begins in.

        The driver knows the allocator's segments, and refuses only what goes beyond these.
        """
        for row in rows:
            within = self.shadow.usable_before_gap(row, width)
            if 0 < within < width:
                text = f"{width - within:,} of {width:,} bytes lie beyond the end of the block that it begins in"
                found = CheckFinding(
                    "memcheck", "invalid-copy", text, mode, "global", row, width, operation.name, usable=within
                )
                operation.findings = [*operation.findings, found]
                return

    @staticmethod
    def _find_overlap(operation: Operation, targets: list[int], sources: list[int], width: int) -> None:
        """Report a copy that overwrites what it still has to read. Rows that are copied to themselves stay as they are.

        "The memory areas may not overlap" (CUDA Runtime API, cudaMemcpy2D, cudaMemcpy3D).
        """
        if min(targets) >= max(sources) + width or min(sources) >= max(targets) + width:
            return  # most copies: one side ends before the other begins
        ascending = sorted(sources)
        for to, source in zip(targets, sources, strict=True):
            nearest = ascending[bisect.bisect_left(ascending, to - width + 1) :][:2]
            for other in nearest:
                start, stop = max(to, other), min(to, other) + width
                if start < stop and not to == source == other:
                    text = f"its source and its target overlap, here in {format_bytes(stop - start)}"
                    found = CheckFinding(
                        "memcheck", "invalid-copy", text, "write", "global", start, stop - start, operation.name
                    )
                    operation.findings = [*operation.findings, found]
                    return

    def hold(self, allocation: Allocation, give_back: Callable[[], None]) -> None:
        """Keep freed memory from being given out again: a late access then finds no other allocation."""
        self._held.append((allocation.size, give_back))
        self._held_bytes += allocation.size
        while self._held_bytes > _QUARANTINE and len(self._held) > 1:
            self._release_one()

    def release_held(self) -> bool:
        """Give back all memory that is held, because there is no other; return whether there was any."""
        some = bool(self._held)
        while self._held:
            self._release_one()
        return some

    def _release_one(self) -> None:
        size, give_back = self._held.popleft()
        self._held_bytes -= size
        give_back()

    @contextmanager
    def hidden(self, allocations: Sequence[Allocation]) -> Iterator[None]:
        """Within the ``with`` block, kernels have no access to these allocations of another device."""
        with ExitStack() as stack:
            for one in allocations if self._looks_for("memcheck") else ():
                stack.enter_context(self.shadow.hidden(one.address, one.size))
            self._apart = allocations
            try:
                yield
            finally:
                self._apart = ()

    # ---- findings ----

    def explain(
        self, found: Found, kernel: JitKernel, block: tuple[int, int, int], shared: int, params: bytes
    ) -> CheckFinding:
        """Return what a kernel did wrong, in words.

        It was launched with blocks of this shape and this much dynamic shared memory, and these packed arguments.
        """
        check, kind, text = _DEFECTS[found.defect.name]
        text = text.format(
            size=found.size,
            kernel=kernel_name(kernel.name),
            history_limit=format_bytes(self.shadow.history_limit),
            own=f"{_STRONG[found.mode]} at {kernel.source_of(found.line)}",
            other=f"{_STRONG[found.other_mode]} at {kernel.source_of(found.other_line)}",
        )
        pointer = usable = 0
        if found.defect is DefectCode.INVALID:
            if found.space == "global":
                usable = self.shadow.usable_bytes(found.address, found.size)
                pointer = pointer_behind(kernel.pointers_at(found.line, params), self._machine.allocations)
            kind, text = self._invalid(found, kernel, shared, pointer)
        other_block: tuple[int, ...] = ()
        other_thread: tuple[int, ...] = ()
        other_source: SourceLine | None = None
        if kind in ("kernel-race", "stale-read", "cas-guess"):
            text = _GUESS if kind == "cas-guess" else _race_text(found, RaceReason)
            other_block = found.other_block or found.block
            other_thread = _coordinates(found.other_thread, block)
            other_source = kernel.source_of(found.other_line)
        return CheckFinding(
            check=check,
            kind=kind,
            text=text,
            mode=found.mode if check != "synccheck" else "",
            space=found.space if check != "synccheck" else "",
            address=found.address,
            size=found.size,
            kernel=kernel.name,
            block=found.block,
            thread=_coordinates(found.thread, block),
            source=kernel.source_of(found.line),
            count=found.count,
            other_block=other_block,
            other_thread=other_thread,
            other_source=other_source,
            pointer=pointer,
            usable=usable,
        )

    def ended(
        self, operation: Operation, error: KernelError, message: str, kernel: JitKernel, block: tuple[int, int, int]
    ) -> None:
        """Report what ended a launch with blocks of this shape early, for memcheck, which looks for such errors.

        The program may go on, as if nothing had happened: no later call says which kernel it was. A kernel that took
        longer than the software device was told to let it is no error. One that made a wrong access or missed a
        barrier before, which is reported, has gone on in a way that no GPU would: nothing is made of its end.
        """
        misled = any(found.check in ("memcheck", "synccheck") for found in operation.findings)
        if misled or isinstance(error, jit.KernelTimeout) or not self._looks_for("memcheck"):
            return
        found = CheckFinding(
            "memcheck",
            "invalid-free" if isinstance(error, jit.KernelBadFree) else "kernel-error",
            error.what or message,
            kernel=kernel.name,
            block=error.block,
            thread=_coordinates(error.thread, block) if error.block else (),
            source=kernel.source_of(error.line) if error.line else None,
        )
        operation.findings = [*operation.findings, found]

    def _looks_for(self, check: str) -> bool:
        return _KINDS[check] in self.shadow.kinds

    def _invalid(self, found: Found, kernel: JitKernel, shared: int, pointer: int) -> tuple[str, str]:
        if found.space == "shared":
            return "out-of-bounds", f"the block's shared memory has {kernel.text.shared_bytes(shared)} bytes"
        if found.space == "local":
            return "out-of-bounds", f"the thread's local memory has {kernel.local_bytes} bytes"
        if found.mode != "read" and self.shadow.is_read_only(found.address, found.size):
            owner = self._machine.allocations.holding(found.address)
            if owner is not None and owner.kind == "virtual":
                return "read-only", "a mapping whose access is CU_MEM_ACCESS_FLAGS_PROT_READ"
            return "read-only", "a __constant__ variable, which no kernel may write to"
        return self.describe(found.address, found.size, pointer)

    def describe(self, address: int, size: int, pointer: int) -> tuple[str, str]:
        """Return the kind of a defect and what is at an address that must not be used.

        `pointer` is the kernel's argument that it was computed from, 0 if that is not known.
        """
        if not address >> 12:
            return "out-of-bounds", "a null pointer, or an offset from one"
        for one in self._apart:
            if one.address <= address < one.address + one.size:
                return "peer-access", f"memory of device {one.device}, to which the kernel's device has no access"
        allocations = self._machine.allocations
        for freed in reversed(self._freed):
            if not pointer and freed.address <= address < freed.address + freed.size:
                return "use-after-free", f"{address - freed.address} bytes into freed memory of {freed.size} bytes"
        if self.shadow.in_freed_block(address):
            return "use-after-free", "in a block of the kernels' own heap that was freed"
        if place := place_of(address, size, allocations, pointer):
            return "out-of-bounds", place
        arena = self._machine.arena
        if not arena.base <= address < arena.base + arena.size:
            return "host-pointer", "not memory of a device: a pointer of the host?"
        return "out-of-bounds", "far from every allocation"

    def explain_call(self, name: str, address: int) -> CheckFinding | None:
        """Return what a call that the driver refused did to memory, None if that is not why it was refused."""
        if name.startswith("cuMemFree"):
            waits = self._machine.allocations.at(address)  # for the free before to run
            twice = (waits is not None and (waits.is_given_back or waits.kind == "graph")) or any(
                freed.address == address for freed in self._freed
            )
            kind = "double-free" if twice else "invalid-free"
            text = "the memory was freed before" if twice else "no memory that can be freed begins there"
            return CheckFinding("memcheck", kind, text, address=address, kernel=name)
        if name.startswith(("cuMemcpy", "cuMemset")) and abi.call.message:
            return CheckFinding("memcheck", "invalid-copy", abi.call.message, address=abi.call.address, kernel=name)
        return None


def _race_text(found: Found, reasons: type[RaceReason]) -> str:
    """Return why nothing orders the accesses of a race, or why order does not help, and what would."""
    if found.reason is reasons.READ_ONLY_CACHE:
        return (
            "what is read through the read-only cache must not be written in the same launch, before or after the "
            "read: the cache does not see it, and no barrier helps. __ldg() reads through it, and so does a const "
            "__restrict__ pointer, which promises that the launch does not write there: read without these, or in the "
            "next launch"
        )
    if found.reason is reasons.TEXTURE_CACHE:
        return (
            "the texture cache does not see what the same launch has written, and no barrier helps: read by a pointer, "
            "or in the next launch"
        )
    other = {"read": "read", "write": "write", "atomic": "atomic update"}[found.other_mode]
    why = {
        reasons.NO_BARRIER: "no barrier between: __syncthreads() orders them",
        reasons.NO_WARP_SYNC: "two lanes of a warp, no __syncwarp() between that both are in the mask of",
        reasons.NO_ORDER: (
            "blocks run in any order: hand the data over by a flag (__threadfence() before it is set and after it was "
            "read), with grid.sync(), or in a launch of its own"
        ),
        reasons.NARROW_ATOMIC: "they are in different blocks, but an atomic has the scope of a block: use the device's",
        reasons.NARROW_FENCE: (
            "the flag between the blocks is released or read at block scope: __threadfence() and atomics of the "
            "device's scope order them"
        ),
        reasons.NO_FENCE: "the flag was read, but no __threadfence() follows that read",
        reasons.NOT_WAITED: "an asynchronous copy that the thread has not waited for: wait for it, then synchronize",
    }
    assert found.reason is not None
    return f"nothing orders it and the other thread's {other} ({why[found.reason]})"


def _instrument(checks: Iterable[str]) -> Instrument:
    kinds = Instrument.NONE
    for check in checks:
        kinds |= Instrument[check.upper()]
    return kinds


def _coordinates(number: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1])
