"""Elementwise functions from C++ source, as ``torch.cuda.jiterator`` makes them.

They are compiled when they are first called, once for each combination of dtypes.
"""

from cudatool.jiterator._functions import JitFunction, create_jit_fn, create_multi_output_jit_fn

__all__ = ["JitFunction", "create_jit_fn", "create_multi_output_jit_fn"]
