"""What a pair of kernels is: the same text twice, once with what orders its accesses and once without.

A body uses ``t`` and ``b`` (thread and block), ``me`` (number of the thread in the grid), ``g`` (16 Ki integers of zeros,
the last quarter for flags), ``h`` (what threads saw, ``h[me]`` is the thread's own), ``s`` and ``q`` (512 integers of
shared memory each), ``m`` (four 64-bit words of it). At each ``@`` stands what differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Pair", "Rule", "kernel_name", "source"]


class Rule(StrEnum):
    """What decides whether two accesses race, and where it is stated."""

    BARRIER = "bar.sync orders what the threads that take part did before and do after (PTX ISA, bar)"
    COUNT = "a named barrier waits for as many threads as it is given, whichever they are (PTX ISA, bar)"
    ARRIVE = "what a thread did before bar.arrive is before what those do next that wait (PTX ISA, bar)"
    WARP = "__syncwarp orders the accesses of the lanes in its mask (CUDA C++ Programming Guide, Warp Synchronization)"
    INTRINSIC = "shuffles, votes and the like are no memory barriers (CUDA C++ Programming Guide, Warp Functions)"
    COPY = "cp.async is ordered by a wait of its own thread alone (PTX ISA, cp.async.wait_group)"
    COPY_READS = "after cp.async.bulk.wait_group.read a copy may still write (PTX ISA, cp.async.bulk.wait_group)"
    MBARRIER = "an arrival is before what follows a wait that finds the phase complete (PTX ISA, mbarrier.test_wait)"
    INIT = "mbarrier.init and .inval are weak writes, to be ordered before and after all other use (PTX ISA, mbarrier)"
    RELAXED = "relaxed operations order nothing without fences (PTX ISA, Release and Acquire Patterns)"
    SCOPE = "a scope must include the other thread, on both sides (PTX ISA, Morally Strong Operations)"
    FENCE = "a fence orders with a strong write after it, or a strong read before it (PTX ISA, Release and Acquire Patterns)"
    RACE = "conflicting accesses that are not morally strong and in no order race (PTX ISA, Data Race)"
    UPDATE = "an update hands on the release that it read; a plain store does not (PTX ISA, Observation)"
    CHAIN = "what is before a release is before all that follow, over any number of threads (PTX ISA, Causality Order)"
    BYTES = "accesses overlap if they have a byte in common (PTX ISA, Memory Operations)"
    READ_ONLY = "what ld.global.nc reads must be read-only for all of the kernel (CUDA C++ Programming Guide, 5.x)"


@dataclass(frozen=True)
class Pair:
    """Two kernels.

    Attributes
    ----------
    name, rule
        Of both.
    body
        Of both, with `@` where they differ.
    racy, right
        What stands there: one text for each `@`, or one for all.
    block, grid
        Threads, blocks.
    stale
        The racy one is a read through a cache that does not see the launch's writes.
    """

    name: str
    rule: Rule
    body: str
    racy: str | tuple[str, ...]
    right: str | tuple[str, ...]
    block: int = 64
    grid: int = 1
    stale: bool = False

    def text(self, *, racy: bool) -> str:
        """Return the body of one of the two."""
        parts = self.body.split("@")
        given = self.racy if racy else self.right
        given = (given,) * (len(parts) - 1) if isinstance(given, str) else given
        if len(given) != len(parts) - 1:
            raise ValueError(f"{self.name}: {len(parts) - 1} places, {len(given)} texts")
        return "".join(part + more for part, more in zip(parts, (*given, ""), strict=True))


def kernel_name(pair: Pair, *, racy: bool) -> str:
    """Return the name of one of the two kernels."""
    return f"{pair.name}_{'racy' if racy else 'right'}"


def source(pairs: list[Pair], prelude: str) -> str:
    """Return the CUDA C++ of both kernels of each pair."""
    kernels = []
    for pair in pairs:
        for racy in (True, False):
            kernels.append(
                f'extern "C" __global__ void __launch_bounds__(256) {kernel_name(pair, racy=racy)}(int *g, int *h) {{\n'
                "const int t = threadIdx.x, b = blockIdx.x, me = b * blockDim.x + t; (void)t, (void)b, (void)me;\n"
                "__shared__ __align__(128) int s[512], q[512]; __shared__ u64 m[4];\n"
                f"{pair.text(racy=racy)}\n}}"
            )
    return "\n".join([prelude, *kernels])
