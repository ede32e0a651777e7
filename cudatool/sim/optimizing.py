"""When the code of a kernel is optimized.

That takes LLVM ten times as long as to translate it without, some 100 ms and several times that for code that is
checked, and the code is several times as fast. Most launches of tests and of a program's first steps are over before
that pays. So code is optimized for launches of much work, and for those after launches that were much work together:

    work = (threads + rounds of their loops) * instructions of the kernel, or the ns they took, if these are more
    optimized, if the work of the launches before, and of this one's threads, is more than is enough

The longer a kernel is, the longer LLVM takes. So enough is the work of :data:`MANY` threads or rounds, as if of
:data:`LEAST` instructions at least: code that is not optimized takes 30 to 140 ms for it, checked code up to 500 ms,
about what LLVM takes for the kernel. Of ten kernels of `cudatool.ops`, LLVM's time was saved again after 340 M to 8 G.
What an earlier run has optimized is kept: then :data:`ENOUGH_IF_KEPT` is enough. So it is if launches of an earlier run
were a part of what is enough, one in :data:`NOTED`: what each run saves pays for LLVM's time after as many runs.

Code that is not optimized counts the rounds of its loops. A launch that turns out to be much work by them begins no
more blocks in such code: it leaves the others to optimized code.

Such code does one to four simple instructions in a ns. A matrix operation takes hundreds of ns: so the time of
launches counts, too, a ns as one instruction. Results are the same in both, unless threads of one kernel race with each
other.
"""

from __future__ import annotations

__all__ = ["ENOUGH_IF_KEPT", "LEAST", "MANY", "NOTED", "Optimizing", "enough"]

MANY = 1 << 21
LEAST = 64
ENOUGH_IF_KEPT = 1 << 25
"""Instructions: some 5 ms in code that is not optimized."""
NOTED = 8


def enough(instructions: int, *, is_kept: bool) -> int:
    """Return the work from which on the code of a kernel of so many instructions is optimized.

    `is_kept` says whether an earlier run has optimized it, or had part of that work for it.
    """
    return ENOUGH_IF_KEPT if is_kept else MANY * max(instructions, LEAST)


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

    def pays(self, threads: int, rounds: int, spent: int, enough: int) -> bool:
        """Return whether the next launch, of so many threads, is to run optimized code.

        `rounds` and `spent` (ns) are of those before, in code that is not optimized.
        """
        return spent > enough or (self._threads + threads + rounds) * self._instructions > enough  # max() takes longer

    def is_part(self, rounds: int, spent: int, enough: int) -> bool:
        """Return whether the launches so far were so large a part of what is enough that later runs are to know."""
        return spent > enough // NOTED or (self._threads + rounds) * self._instructions > enough // NOTED

    def launched(self, threads: int, rounds: int, spent: int, enough: int) -> bool:
        """Note a launch; return whether it is to run optimized code."""
        pays = self.pays(threads, rounds, spent, enough)
        self._threads += threads
        return pays
