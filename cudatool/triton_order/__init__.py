"""Barriers for Triton's programs: their stores and loads of global memory in the order in which they are written.

In Triton's language a program is one thread that works on whole blocks of values: what ``tl.store`` wrote, a later
``tl.load`` of the same program reads. Triton's compiler orders the threads that a program is made of in shared memory
only. On a GPU they run nearly together, so that programs that read from global memory what another of their threads has
written work, most of the time. The software device runs one thread after the other up to the next barrier, and they
never would. So :func:`ordered` adds barriers.

It works on TTGIR, Triton's last form before LLVM's, in which control flow is still the program's: all threads go the
same way, so that a barrier may stand anywhere. One is added between two accesses of which one writes and that may use
the same bytes from different threads, unless there is one already::

    for each access, in the order in which they are run:
        if it may meet one since the last barrier, of another thread:
            put a barrier before it, or before the loop if one from before the loop is met
        remember it

What two accesses may share is judged by their pointers, which are the program's arguments plus numbers:

- Pointers from different arguments lie apart. (A program that is given one array twice is judged as if it were two.)
- Equal indices, of tensors whose elements lie in the same threads, are a thread's own, as are such with whole blocks
  between them: ``p + i * BLOCK + tl.arange(0, BLOCK)`` in each round of a loop. The elements of one access lie apart.
- The rows of one access do not overlap, whatever the stride between them, nor do rows that are only written.
- Anything else may be shared.

Kernels that give their warps different code (``ttg.warp_specialize``) stay as they are: there a barrier of all threads
would have no place. Triton compiles none for the capability that the software device asks for.
"""

from __future__ import annotations

from cudatool.triton_order.order import ordered

__all__ = ["ordered"]
