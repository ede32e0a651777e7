"""Dense linear algebra with PyTorch's names: cuBLAS on a GPU, NumPy in stream order on the software device.

Every product is one GEMM; the switches are in :mod:`cudatool.backends.cuda`.
"""

from cudatool.blas._conjugate import Conjugate, conj
from cudatool.blas._fused import Fused, addmm_activation, int_mm, mm_epilogue, scaled_mm
from cudatool.blas._products import addmm, addmv, baddbmm, bmm, dot, linear, matmul, mm, mv, vdot
from cudatool.blas._workspace import clear_workspaces

__all__ = [
    "Conjugate",
    "Fused",
    "addmm",
    "addmm_activation",
    "addmv",
    "baddbmm",
    "bmm",
    "clear_workspaces",
    "conj",
    "dot",
    "int_mm",
    "linear",
    "matmul",
    "mm",
    "mm_epilogue",
    "mv",
    "scaled_mm",
    "vdot",
]
