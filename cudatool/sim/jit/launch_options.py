"""What is asked of a launch: by the program, and by the software device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cudatool.sim.jit.footprint import Footprint
from cudatool.sim.jit.host_places import HostPlaces

if TYPE_CHECKING:
    from cudatool.sim.jit.shadow import Shadow

__all__ = ["LaunchOptions", "LaunchShape"]


class LaunchShape(NamedTuple):
    """What a program chooses for a launch, but for the arguments. Launches of one shape need the same of the host.

    Attributes
    ----------
    shared_bytes
        Dynamic shared memory.
    heap
        Of ``malloc`` in kernels (``cudatool_heap_create``); 0 for none.
    stack_bytes
        Stack of a thread, for calls that cannot be inlined; at most :data:`.MAX_STACK` are used.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    heap: int = 0
    stack_bytes: int = 1024

    @property
    def is_large(self) -> bool:
        """Whether 32 bits do not number the threads along an axis."""
        return any(blocks * threads > 2**31 for blocks, threads in zip(self.grid, self.block, strict=True))


class LaunchOptions(NamedTuple):
    """How the software device runs a launch, and what it finds out meanwhile.

    Attributes
    ----------
    threads
        Host threads that run blocks. One gives the same order of everything each time.
    optimized
        Run code that takes long to compile and runs fast. Other code gives the same results, unless threads of the
        kernel race with each other.
    seed
        Permutes the order in which blocks run.
    cooperative
        All blocks run at the same time and may synchronize with each other.
    timeout_s
        Longest time that it may take, 0 for any.
    footprint
        Filled with what the kernel accesses.
    shadow
        What the checkers know of memory; they check the kernel. When races are looked for it runs on one thread.
    host
        The host memory that the kernel may access.
    """

    threads: int = 1
    optimized: bool = True
    seed: int | None = None
    cooperative: bool = False
    timeout_s: float = 0
    footprint: Footprint | None = None
    shadow: Shadow | None = None
    host: HostPlaces | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing but results is asked for, in any order of blocks, however long that takes."""
        return (
            self.footprint is None
            and self.shadow is None
            and self.seed is None
            and not self.timeout_s
            and not self.cooperative
        )
