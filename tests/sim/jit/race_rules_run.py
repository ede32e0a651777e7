"""Does racecheck say of kernels what CUDA's rules say? Pairs of kernels (:mod:`race_rules`), of which one races.

    python tests/sim/jit/race_rules_run.py [--only TEXT]

runs all of them and exits with 1 if one is missed or false; the test suite runs a part, as each kernel is compiled.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable

import numpy as np
from race_rules import Pair, kernel_name, source
from race_rules_all import MODULES, PAIRS

from cudatool.sim import jit
from cudatool.sim.jit import DefectCode, Found, Instrument

__all__ = ["Checker"]

_INTEGERS = 16384  # of each of the two arrays
_RACES = {DefectCode.READ_AFTER_WRITE, DefectCode.WRITE_AFTER_READ, DefectCode.WRITE_AFTER_WRITE}


class Checker:
    """Runs the kernels under racecheck, all of them over the same memory."""

    def __init__(self, compiled: Callable[[str], bytes]) -> None:
        self._kernels = {name: jit.load(compiled(source(m.PAIRS, m.PRELUDE))).kernels for name, m in MODULES.items()}
        whole = np.zeros(8 * _INTEGERS + 4096, np.uint8)
        self._memory = whole[-whole.ctypes.data % 4096 :][: 8 * _INTEGERS]
        self._shadow = jit.Shadow(self._memory.ctypes.data, self._memory.nbytes, Instrument.RACECHECK)

    def found(self, module: str, pair: Pair, *, racy: bool) -> list[Found]:
        """Return what is found in one kernel of a pair."""
        self._memory[:] = 0
        first = self._memory.ctypes.data
        params = (ctypes.c_uint64 * 2)(first, first + 4 * _INTEGERS)
        return self._kernels[module][kernel_name(pair, racy=racy)].launch(
            jit.LaunchShape((pair.grid, 1, 1), (pair.block, 1, 1)),
            ctypes.addressof(params),
            jit.LaunchOptions(shadow=self._shadow, optimized=False),
        )

    def difference(self, module: str, pair: Pair) -> str:
        """Return what racecheck says other than a pair's labels, empty if nothing."""
        if false := {one.defect for one in self.found(module, pair, racy=False)}:
            return f"{pair.name}: false: {sorted(false)} ({pair.rule})"
        found = {one.defect for one in self.found(module, pair, racy=True)}
        if not found & ({DefectCode.STALE_READ} if pair.stale else _RACES):
            return f"{pair.name}: missed ({pair.rule})"
        return ""


def main() -> int:
    """Run the command line; return the exit code."""
    from conftest import nvrtc_ptx

    from cudatool import _driver

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="pairs whose name contains this")
    options = parser.parse_args()
    _driver.initialize()
    checker = Checker(nvrtc_ptx)
    chosen = [one for one in PAIRS if options.only in one[1].name]
    differences = [text for one in chosen if (text := checker.difference(*one))]
    sys.stdout.write("".join(f"{text}\n" for text in differences))
    sys.stdout.write(f"{len(chosen)} pairs, {len(differences)} differences\n")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
