"""When the code of a kernel is optimized.

That takes LLVM ten times as long as to translate it without, about 100 ms, and the code is several times as fast. Most
launches of tests and of a program's first steps are over before that pays. So code is optimized for launches of much
work, and for those after launches that were much work together:

    work of a launch = threads * instructions of a thread; what is in a loop counts 64 times
    optimized, if the work of this launch and those before it is more than 32 M instructions
    optimized, if the kernel has loops and was launched three times: they may go round much more often

No clock is looked at: a program runs the same code whenever it runs. The results are the same in both, unless threads
of one kernel race with each other.
"""

from __future__ import annotations

from collections import Counter

from cudatool.ptx import Flow, Function

__all__ = ["Optimizing"]

_ENOUGH = 1 << 25  # instructions: some 5 ms in code that is not optimized
_LOOP_COUNT = 64
_MOST_LOOPS = 3  # around each other, that count
_MOST_LAUNCHES = 3  # of a kernel with loops


class Optimizing:
    """What the launches of a kernel were so far."""

    def __init__(self, function: Function) -> None:
        flow = Flow(function)
        around = Counter(number for loop in flow.natural_loops().values() for number in loop)
        self._has_loops = bool(around)
        self._of_a_thread = sum(
            (block.stop - block.start) * _LOOP_COUNT ** min(around[number], _MOST_LOOPS)
            for number, block in enumerate(flow.blocks)
        )
        self._launches = self._work = 0

    def pays(self, threads: int) -> bool:
        """Return whether the next launch, of so many threads in all, is to run optimized code."""
        is_much = self._work + threads * self._of_a_thread > _ENOUGH
        return is_much or (self._has_loops and self._launches >= _MOST_LAUNCHES)

    def launched(self, threads: int) -> bool:
        """Note a launch; return whether it is to run optimized code."""
        pays = self.pays(threads)
        self._launches += 1
        self._work += threads * self._of_a_thread
        return pays
