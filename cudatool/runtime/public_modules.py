"""The modules that a program imports; docs/api.md and the tests of the interface go through these."""

from typing import Final

__all__ = ["PUBLIC_MODULES"]

PUBLIC_MODULES: Final = (
    "cudatool",
    "cudatool.amp",
    "cudatool.backends",
    "cudatool.backends.cuda",
    "cudatool.blas",
    "cudatool.comm",
    "cudatool.compiler",
    "cudatool.gds",
    "cudatool.graphs",
    "cudatool.jiterator",
    "cudatool.multiprocessing",
    "cudatool.nccl",
    "cudatool.nvtx",
    "cudatool.ops",
    "cudatool.optim",
    "cudatool.profiler",
    "cudatool.random",
    "cudatool.tunable",
)
