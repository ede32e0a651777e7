"""How products are computed on CUDA devices, as in ``torch.backends.cuda``: precision, reductions, library.

::

    cudatool.backends.cuda.matmul.allow_tf32 = True
    cudatool.backends.cuda.preferred_blas_library("cublaslt")
"""

from __future__ import annotations

from typing import Final

from cudatool.backends._settings import LIBRARIES, settings
from cudatool.errors import UsageError
from cudatool.runtime.traced_calls import traced

__all__ = ["Matmul", "matmul", "preferred_blas_library"]


class Matmul:
    """Switches of products; an attribute that is none of them cannot be set."""

    __slots__ = ()

    @property
    def allow_tf32(self) -> bool:
        """Whether float32 products may round their inputs to ten bits of mantissa (TF32). Default: no."""
        return settings.allow_tf32

    @allow_tf32.setter
    def allow_tf32(self, value: bool) -> None:
        settings.float32_matmul_precision = "high" if _is_on(value) else "highest"

    @property
    def fp32_precision(self) -> str:
        """The same as a word: ``"tf32"`` or ``"ieee"``."""
        return "tf32" if settings.allow_tf32 else "ieee"

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        if value not in ("tf32", "ieee"):
            raise UsageError(f"fp32_precision is 'tf32' or 'ieee', not {value!r}")
        self.allow_tf32 = value == "tf32"

    @property
    def allow_fp16_reduced_precision_reduction(self) -> bool:
        """Whether sums of float16 products may be rounded to float16 on the way. Default: yes."""
        return settings.allow_fp16_reduced_precision_reduction

    @allow_fp16_reduced_precision_reduction.setter
    def allow_fp16_reduced_precision_reduction(self, value: bool) -> None:
        settings.allow_fp16_reduced_precision_reduction = _is_on(value)

    @property
    def allow_bf16_reduced_precision_reduction(self) -> bool:
        """Whether sums of bfloat16 products may be rounded to bfloat16 on the way. Default: yes."""
        return settings.allow_bf16_reduced_precision_reduction

    @allow_bf16_reduced_precision_reduction.setter
    def allow_bf16_reduced_precision_reduction(self, value: bool) -> None:
        settings.allow_bf16_reduced_precision_reduction = _is_on(value)


def _is_on(value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"a switch is True or False, not {value!r}")
    return value


matmul: Final = Matmul()


@traced
def preferred_blas_library(backend: str | None = None) -> str:
    """Return which library computes products on a GPU; set it first, if one is named.

    Parameters
    ----------
    backend
        ``"default"``, which is cuBLAS; ``"cublas"``; ``"cublaslt"``. What only cuBLASLt can do is always its.

    Raises
    ------
    UsageError
        There is no such library.
    """
    if backend is not None:
        if backend not in LIBRARIES:
            raise UsageError(f"the libraries are {', '.join(LIBRARIES)}, not {backend!r}")
        settings.blas_library = backend
    return settings.blas_library
