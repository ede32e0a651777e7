"""Switches that PyTorch has at its top: precision of float32 products, deterministic algorithms."""

from __future__ import annotations

from cudatool.backends._settings import PRECISIONS, settings
from cudatool.errors import UsageError

__all__ = [
    "are_deterministic_algorithms_enabled",
    "get_float32_matmul_precision",
    "is_deterministic_algorithms_warn_only_enabled",
    "set_float32_matmul_precision",
    "use_deterministic_algorithms",
]


def set_float32_matmul_precision(precision: str) -> None:
    """Choose the precision of float32 products: ``"highest"``, or ``"high"`` or ``"medium"``, which are both TF32.

    Raises
    ------
    UsageError
        There is no such precision.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"the precisions are {', '.join(PRECISIONS)}, not {precision!r}")
    settings.float32_matmul_precision = precision


def get_float32_matmul_precision() -> str:
    """Return the precision of float32 products."""
    return settings.float32_matmul_precision


def use_deterministic_algorithms(mode: bool, *, warn_only: bool = False) -> None:
    """Let operations that could differ from run to run fail, or only warn.

    Products on a GPU are such, unless ``CUBLAS_WORKSPACE_CONFIG`` is ``:4096:8`` or ``:16:8``.
    """
    settings.deterministic = mode
    settings.deterministic_warn_only = mode and warn_only


def are_deterministic_algorithms_enabled() -> bool:
    """Return whether operations must be deterministic."""
    return settings.deterministic


def is_deterministic_algorithms_warn_only_enabled() -> bool:
    """Return whether operations that are not deterministic only warn."""
    return settings.deterministic_warn_only
