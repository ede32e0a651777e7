"""When the code of a kernel is optimized.

That takes LLVM ten times as long as to translate it without, about 100 ms, and the code is several times as fast. Most
launches of tests and of a program's first steps are over before that pays. So code is optimized for launches of much
work, and for those after launches that were much work together:

    work = (threads + rounds of their loops) * instructions of the kernel
    optimized, if the work of the launches before, and of this one's threads, is more than 32 M instructions

Code that is not optimized counts the rounds of its loops. A launch that turns out to be much work by them begins no
more blocks in such code: it leaves the others to optimized code.

No clock is looked at: a program runs the same code whenever it runs. The results are the same in both, unless threads
of one kernel race with each other.
"""

from __future__ import annotations

__all__ = ["ENOUGH", "Optimizing"]

ENOUGH = 1 << 25
"""Instructions: some 5 ms in code that is not optimized."""


class Optimizing:
    """What the launches of a kernel were so far.

    Parameters
    ----------
    instructions
        Of the kernel.
    """

    def __init__(self, instructions: int) -> None:
        self._instructions = instructions
        self._threads = 0

    def pays(self, threads: int, rounds: int) -> bool:
        """Return whether the next launch, of so many threads, is to run optimized code; `rounds` is of those before."""
        return (self._threads + threads + rounds) * self._instructions > ENOUGH

    def launched(self, threads: int, rounds: int) -> bool:
        """Note a launch; return whether it is to run optimized code."""
        pays = self.pays(threads, rounds)
        self._threads += threads
        return pays
