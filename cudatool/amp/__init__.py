"""Automatic mixed precision: operations in the precision that suits each, and gradients scaled to fit in it."""

from cudatool.amp._grad_scaler import GradScaler

__all__ = ["GradScaler"]
