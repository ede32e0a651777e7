"""How products may be computed: one set of switches for the process, as PyTorch has them."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

__all__ = ["LIBRARIES", "PRECISIONS", "Settings", "settings", "version"]

LIBRARIES = ("default", "cublas", "cublaslt")
"""Libraries that a program may prefer; the default is cuBLAS."""

PRECISIONS = ("highest", "high", "medium")
"""Of float32 products: float32, or with inputs rounded to TF32, which is both others."""


version = 0
"""Another number whenever a switch was set."""
_versions = itertools.count(1)


def _precision_at_first() -> str:
    return "high" if os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0") == "1" else "highest"


@dataclass(slots=True)
class Settings:
    """The switches, with PyTorch's defaults."""

    float32_matmul_precision: str = field(default_factory=_precision_at_first)
    allow_fp16_reduced_precision_reduction: bool = True
    allow_bf16_reduced_precision_reduction: bool = True
    blas_library: str = "default"
    deterministic: bool = False
    deterministic_warn_only: bool = False

    def __setattr__(self, name: str, value: object) -> None:
        global version
        object.__setattr__(self, name, value)
        version = next(_versions)

    @property
    def allow_tf32(self) -> bool:
        """Whether float32 products may round their inputs to TF32."""
        return self.float32_matmul_precision != "highest"


settings = Settings()
