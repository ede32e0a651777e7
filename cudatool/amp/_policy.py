"""In which precision autocast runs each operation.

The classes and who is in which are torch's ("CUDA Op-Specific Behavior" in its documentation of AMP), where these
operations exist here. What no list names runs in the types it is given.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["POLICIES", "CastPolicy"]


class CastPolicy(StrEnum):
    """What autocast does with the arrays of an operation that are float16, bfloat16 or float32."""

    LOWER_PRECISION = "lower precision"
    """All become the dtype of autocast: products of matrices, which half precision makes fast and does not harm."""
    FLOAT32 = "float32"
    """All become float32: functions that overflow, or sum much."""
    FLOAT32_RESULT = "float32 result"
    """As FLOAT32, but by the operation's own `dtype`, which is left alone if it is given."""
    WIDEST = "widest"
    """All become float32 if one of them is, else the dtype of autocast: they must be of one dtype."""


_MEMBERS: Final = {
    CastPolicy.LOWER_PRECISION: (
        "blas.addmm blas.addmv blas.baddbmm blas.bmm blas.linear blas.matmul blas.mm blas.mv",
        # Not torch's: what cuBLASLt fuses to a product.
        "blas.addmm_activation blas.mm_epilogue",
    ),
    CastPolicy.FLOAT32: (
        "ops.exp ops.expm1 ops.log ops.log10 ops.log1p ops.log2 ops.logsumexp ops.pow ops.reciprocal ops.rsqrt ops.tan",
        "ops.layer_norm ops.native_layer_norm ops.softplus",
        "ops.cross_entropy",  # for torch two operations, both of this class
    ),
    CastPolicy.FLOAT32_RESULT: ("ops.log_softmax ops.norm ops.prod ops.softmax ops.sum",),
    CastPolicy.WIDEST: ("blas.dot blas.vdot ops.addcdiv ops.addcmul ops.atan2",),
}

POLICIES: Final = {
    f"cudatool.{name}": policy for policy, lines in _MEMBERS.items() for line in lines for name in line.split()
}
"""Name of an operation -> what autocast does."""
