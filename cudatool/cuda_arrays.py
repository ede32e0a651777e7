"""The sizes of CUDA arrays: what textures and surfaces are made of, which has no address that programs see.

Formats and extents are those of ``CUDA_ARRAY3D_DESCRIPTOR`` (Driver API, ``cuArray3DCreate``). Hardware pads rows and
slices in a way that is not documented: the bytes here are those of the elements.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["CHANNEL_BYTES", "CUBEMAP", "LAYERED", "array_bytes", "described_bytes", "level_extents"]

CHANNEL_BYTES: Final = {0x01: 1, 0x02: 2, 0x03: 4, 0x08: 1, 0x09: 2, 0x0A: 4, 0x10: 2, 0x20: 4}
"""``CUarray_format`` -> bytes of a channel, of the formats that do not say how many channels there are."""
LAYERED: Final = 0x01
CUBEMAP: Final = 0x04


def level_extents(extent: tuple[int, int, int], flags: int, levels: int) -> list[tuple[int, int, int]]:
    """Return width, height and depth (0: it has none) of each level of a mipmapped array, each half the one before."""
    extents = [extent]
    while len(extents) < levels:
        width, height, depth = extents[-1]
        layers = flags & (LAYERED | CUBEMAP)  # which all levels have as many of
        extents.append(
            (max(width // 2, 1), height and max(height // 2, 1), depth if layers else depth and max(depth // 2, 1))
        )
    return extents


def array_bytes(width: int, height: int, depth: int, element: int) -> int:
    """Return the bytes of an array, or of one level, whose elements have so many bytes."""
    return element * width * max(height, 1) * max(depth, 1)


def described_bytes(descriptor: bytes, levels: int = 0) -> int:
    """Return the bytes of the array, or of so many levels, that a ``CUDA_ARRAY_DESCRIPTOR`` or a
    ``CUDA_ARRAY3D_DESCRIPTOR`` describes; 0 if the format is none of :data:`CHANNEL_BYTES`.
    """
    if len(descriptor) == _DESCRIPTOR.size:
        (width, height, format_, channels), depth, flags = _DESCRIPTOR.unpack(descriptor), 0, 0
    elif len(descriptor) == _DESCRIPTOR_3D.size:
        width, height, depth, format_, channels, flags = _DESCRIPTOR_3D.unpack(descriptor)
    else:
        return 0
    element = channels * CHANNEL_BYTES.get(format_, 0)
    return sum(array_bytes(*extent, element) for extent in level_extents((width, height, depth), flags, levels))


_DESCRIPTOR = struct.Struct("QQiI")
_DESCRIPTOR_3D = struct.Struct("QQQiII4x")
