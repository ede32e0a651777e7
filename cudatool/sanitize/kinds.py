"""One row for each kind of finding: what reports, SARIF rules and ``docs/findings.md`` say of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cudatool.config import DOCS
from cudatool.errors import UsageError, names_given
from cudatool.sanitize.findings import DeviceFinding, Finding, FindingKind

__all__ = ["CHECKS", "KINDS", "KindText", "check_of", "help_url", "named_checks", "parse_checks"]

CHECKS: Final = ("race", "memcheck", "initcheck", "racecheck", "synccheck", "leak")
"""What can be looked for. Each finding is of one of these."""


@dataclass(frozen=True, slots=True)
class KindText:
    """What is said of a kind of finding.

    Attributes
    ----------
    title
        A heading, without a full stop.
    help
        Two or three sentences: what it means, and how it is repaired.
    fails
        Whether a run fails of it. Otherwise it is a warning: it breaks a rule, and changes no result.
    """

    title: str
    help: str
    fails: bool = True


KINDS: Final[dict[FindingKind, KindText]] = {
    FindingKind.RACE_RAW: KindText(
        "race: a read that may come before the write",
        "Work reads what other work writes, and nothing orders the read after the write. The read may see the old "
        "bytes, or half of the new ones. Let the reading stream wait for an event recorded after the write.",
    ),
    FindingKind.RACE_WAR: KindText(
        "race: a write that may come before the read",
        "Work overwrites what earlier work still has to read, and nothing orders the write after the read. Let the "
        "writing stream wait for an event recorded after the read, or write to another buffer.",
    ),
    FindingKind.RACE_WAW: KindText(
        "race: two writes in no order",
        "Two operations write the same bytes and nothing orders them, so that either result may remain. Let the "
        "second stream wait for an event recorded after the first write.",
    ),
    FindingKind.RACE_HOST: KindText(
        "race: the host and the device, in no order",
        "The host touches memory that the device may still be using. Synchronize the stream, or an event recorded "
        "after the device's last use, before the host touches it.",
    ),
    FindingKind.REUSE: KindText(
        "memory given to a new owner while a stream may still use it",
        "A caching allocator gave a freed block to a new owner on the stream that it was allocated for, while another "
        "stream may still be using it for the old one. Call `record_stream` for that stream before the block is freed, "
        "or let the allocating stream wait for it.",
    ),
    FindingKind.USE_AFTER_FREE: KindText(
        "use of memory after it was freed",
        "An operation uses memory that was given back before, or that may have been given back in stream order before "
        "it runs. Free it later, or order the free after the last use.",
    ),
    FindingKind.USE_BEFORE_ALLOC: KindText(
        "use of memory before its stream-ordered allocation",
        "Memory of a stream-ordered allocation exists from its place in that stream on, and nothing orders this "
        "operation on another stream after that. Let the other stream wait for an event recorded after the allocation.",
    ),
    FindingKind.WAIT_UNRECORDED: KindText(
        "a wait for an event that was not recorded yet",
        "Before its first record an event is an empty set of work, so the wait did nothing, and what it was meant to "
        "order races. Record the event before the call that waits for it. Such a wait is reported only together "
        "with a race that it would have prevented.",
    ),
    FindingKind.CAPTURE_MISSED: KindText(
        "work outside a capture that needs what was captured",
        "While a stream captured, the same thread gave work to a stream that took no part, and that work uses what a "
        "captured call has yet to make. It ran once, too early, and no launch of the graph repeats it. Let the stream "
        "take part: let it wait for an event recorded in the capture, and join it again at the end.",
    ),
    FindingKind.CAPTURED_EVENT: KindText(
        "a wait for an event that belongs to a captured graph",
        "An event recorded in a capture is a place in the graph, with no work to wait for. Record an event after the "
        "launch of the graph and wait for that, or let the graph record one (CU_EVENT_RECORD_EXTERNAL).",
    ),
    FindingKind.OUT_OF_BOUNDS: KindText(
        "access out of bounds",
        "A thread of a kernel reads or writes outside of every allocation, or of the kernel's shared or local memory. "
        "The software device does not make the access. Check the index against the size, and the size that the host "
        "passes against the allocation.",
    ),
    FindingKind.HOST_POINTER: KindText(
        "a kernel uses a pointer of the host",
        "A kernel was given the address of ordinary host memory, which a device cannot reach. Copy the data to device "
        "memory, or allocate it as pinned or managed memory.",
    ),
    FindingKind.PEER_ACCESS: KindText(
        "use of another device's memory without access to it",
        "A kernel was given the address of another device's memory, to which its own device has no access. Call "
        "`cudatool.enable_peer_access`, `cuCtxEnablePeerAccess`, or `cuMemPoolSetAccess` for memory of a pool, or copy "
        "the data.",
    ),
    FindingKind.READ_ONLY: KindText(
        "a kernel writes to memory for reading",
        "A thread writes to a `__constant__` variable, by its name or by a pointer to it, or to a mapping whose access "
        "is `CU_MEM_ACCESS_FLAGS_PROT_READ`. The software device does not make the access. Declare the variable "
        "`__device__`, or let the host write it.",
    ),
    FindingKind.MISALIGNED: KindText(
        "misaligned access",
        "A thread accesses an address that is not a multiple of the access's size, which ends the kernel on a GPU. "
        "Align the pointer, or read the value in smaller pieces.",
    ),
    FindingKind.UNINITIALIZED: KindText(
        "read of memory that was never written",
        "A kernel, or a copy to the host, reads bytes of an allocation that nothing has written: new memory is not "
        "cleared. Fill it first, or read only what was written.",
    ),
    FindingKind.KERNEL_RACE: KindText(
        "race between threads of a kernel",
        "Two threads of one launch access the same bytes, one of them writes, and no barrier or atomic operation "
        "orders them. Put a barrier between the two accesses, use atomics, or give each thread its own bytes.",
    ),
    FindingKind.STALE_READ: KindText(
        "read through a cache that misses the launch's writes",
        "A kernel reads with `__ldg()`, through a `const __restrict__` pointer, or as a texture or surface what the "
        "same launch writes. These caches do not see such a write, so the read may give the old bytes even after a "
        "barrier. Read through an ordinary pointer, or in the next launch.",
    ),
    FindingKind.CAS_GUESS: KindText(
        "plain read before a loop of atomicCAS",
        "A loop of `atomicCAS` takes its first guess by a plain read, while other threads update the value. By the "
        "memory model that is a race. It changes no result, as nothing depends on the guess before `atomicCAS` has "
        "compared it: this is a warning, and no run fails of it. Read atomically, with `cuda::atomic_ref` or through a "
        "`volatile` pointer.",
        fails=False,
    ),
    FindingKind.BARRIER_DIVERGENCE: KindText(
        "a barrier that not all threads reach",
        "Some threads of a block or warp wait at a barrier that others never reach: they branched around it or "
        "returned. Move the barrier out of the branch, and let no thread return before it.",
    ),
    FindingKind.BAD_MASK: KindText(
        "a warp operation with a wrong member mask",
        "A thread executes a warp-wide operation whose member mask does not name it. Compute the mask with "
        "`__ballot_sync` before the branch, or call the operation where the whole warp is.",
    ),
    FindingKind.ABSENT_LANE: KindText(
        "a warp operation on a lane that is not there",
        "A shuffle takes the value of a lane that its member mask names, or a matrix operation works on all lanes of "
        "its warp, but a lane has returned from the kernel, or the block is too small to have it. The result is "
        "undefined. Let all 32 lanes reach the operation, those without work with a neutral value, or pass a shuffle "
        "a `width` that the lanes fill.",
    ),
    FindingKind.INVALID_FREE: KindText(
        "free of what is no allocation",
        "An address was given back that no allocation begins at. Pass the pointer exactly as the allocation returned "
        "it, to the free that belongs to it.",
    ),
    FindingKind.DOUBLE_FREE: KindText(
        "memory freed twice",
        "An allocation was given back a second time. Let one owner free it.",
    ),
    FindingKind.INVALID_COPY: KindText(
        "copy or fill beyond its memory, or onto itself",
        "A copy or fill goes beyond the allocation, or the block of a caching allocator, that it begins in, or a copy "
        "overwrites what it still has to read. Check its size in bytes, its offset and its pitch.",
    ),
    FindingKind.KERNEL_ERROR: KindText(
        "a kernel ended in an error",
        "A kernel executed a trap, failed an assertion, needed more stack than a thread has, deadlocked, or, on a GPU, "
        "made an access that its hardware refuses; the software device tells which and where. No work of "
        "its context runs any more, and calls return the error until the context is destroyed. Check what calls "
        "return, and repair what the kernel ran into.",
    ),
    FindingKind.LEAK: KindText(
        "memory never given back",
        "Device memory, a CUDA array or pinned memory was still allocated when the program ended. Free it, or close "
        "what owns it.",
    ),
}


def named_checks(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the checks that a text or a list names, in the order of :data:`CHECKS`; ``"all"`` names all.

    Raises
    ------
    UsageError
        One does not exist.
    """
    names = names_given("check", given, (*CHECKS, "all"))
    return CHECKS if "all" in names else names


def parse_checks(text: str) -> tuple[str, ...]:
    """Return the checks that ``"race,memcheck"`` names, in the order of :data:`CHECKS`; ``"all"`` names all.

    Raises
    ------
    UsageError
        One does not exist, or none is named.
    """
    names = named_checks(text)
    if not names:
        raise UsageError(f"name at least one check of {', '.join(CHECKS)}, or all")
    return names


def check_of(finding: Finding | DeviceFinding) -> str:
    """Return which of :data:`CHECKS` a finding is of."""
    return finding.check if isinstance(finding, DeviceFinding) else "race"


def help_url(kind: FindingKind) -> str:
    """Return the address of a kind's section in ``docs/findings.md``, empty without ``CUDATOOL_DOCS``.

    ``CUDATOOL_DOCS`` is where the ``docs`` folder can be read, for example
    ``https://git.example.org/cudatool/blob/v1/docs``.
    """
    base = DOCS.given().rstrip("/")
    return f"{base}/findings.md#{kind}" if base else ""
