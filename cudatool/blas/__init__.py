"""Dense linear algebra: cuBLAS on a GPU, NumPy in stream order on the software device."""

from cudatool.blas._matmul import matmul

__all__ = ["matmul"]
