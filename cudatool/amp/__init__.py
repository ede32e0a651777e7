"""Automatic mixed precision: operations in the precision that suits each, and gradients scaled to fit in it."""

from cudatool.amp._autocast import (
    autocast,
    clear_autocast_cache,
    custom_fwd,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
)
from cudatool.amp._grad_scaler import GradScaler

__all__ = [
    "GradScaler",
    "autocast",
    "clear_autocast_cache",
    "custom_fwd",
    "get_autocast_dtype",
    "is_autocast_cache_enabled",
    "is_autocast_enabled",
]
