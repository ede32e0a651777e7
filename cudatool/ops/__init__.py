"""Operations on arrays: one table, operation x kind of device -> implementation, and the kernels that fill it."""

from cudatool.ops._dispatch import Op, layer, op, registered

__all__ = ["Op", "layer", "op", "registered"]
