"""Arrays, and the records that texture and surface handles point to.

An array's elements lie row by row, as in any other memory; GPUs keep them in an order of their own that no program
sees. A handle is the address of a :class:`TextureRecord`, which kernels read (``cudatool/sim/_texture.c``).
"""

from __future__ import annotations

import ctypes

from cudatool.cuda_arrays import CHANNEL_BYTES
from cudatool.loading.late_dataclasses import dataclass
from cudatool.sim.allocations import Allocation
from cudatool.sim.results import DriverError, Result

__all__ = ["FORMATS", "Array", "MipmappedArray", "SurfaceObject", "TextureObject", "TextureRecord", "describe"]

_UNSIGNED, _SIGNED, _FLOATING = range(3)

_KINDS = {
    0x01: _UNSIGNED,
    0x02: _UNSIGNED,
    0x03: _UNSIGNED,
    0x08: _SIGNED,
    0x09: _SIGNED,
    0x0A: _SIGNED,
    0x10: _FLOATING,
    0x20: _FLOATING,
}
FORMATS = {number: (kind, CHANNEL_BYTES[number]) for number, kind in _KINDS.items()}
"""``CUarray_format`` -> kind, and bytes of a channel."""


class TextureRecord(ctypes.Structure):
    """What a handle points to. The same fields as ``struct texture`` in ``_texture.c``."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("slice_bytes", ctypes.c_uint64),
        ("width", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("channel_bytes", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("as_integer", ctypes.c_int32),
        ("normalized", ctypes.c_int32),
        ("linear", ctypes.c_int32),
        ("srgb", ctypes.c_int32),
        ("mode", ctypes.c_int32 * 3),
        ("border", ctypes.c_float * 4),
        ("levels", ctypes.c_int32),
        ("blends", ctypes.c_int32),
        ("bias", ctypes.c_float),
        ("least", ctypes.c_float),
        ("most", ctypes.c_float),
    )


@dataclass()
class Array:
    """A CUarray. Its `height` and `depth` are as they were given: 0 for what the array has no dimension of.

    Attributes
    ----------
    format, channels
        A key of :data:`FORMATS`, and channels of an element.
    flags
        ``CUDA_ARRAY3D_*``.
    offset
        Of a level of a mipmapped array: where in the memory of all levels it lies.
    """

    handle: int
    width: int
    height: int
    depth: int
    format: int
    channels: int
    flags: int
    allocation: Allocation
    offset: int = 0
    is_level: bool = False

    @property
    def address(self) -> int:
        """Of the first element."""
        return self.allocation.address + self.offset

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return self.slice_bytes * max(self.depth, 1)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return self.channels * FORMATS[self.format][1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which follow each other without gaps."""
        return self.width * self.element_bytes

    @property
    def slice_bytes(self) -> int:
        """Bytes from one slice or layer to the next."""
        return self.row_bytes * max(self.height, 1)

    def record(self) -> TextureRecord:
        """Return a record of the array, without what a texture adds."""
        record = describe(self.address, self.format, self.channels, self.width, max(self.height, 1))
        record.depth = max(self.depth, 1)
        record.row_bytes, record.slice_bytes = self.row_bytes, self.slice_bytes
        return record


@dataclass()
class MipmappedArray:
    """A CUmipmappedArray: arrays of half the size each, in one allocation."""

    handle: int
    levels: list[Array]
    allocation: Allocation

    def records(self) -> ctypes.Array[TextureRecord]:
        """Return the records of all levels, one after the other."""
        made = (TextureRecord * len(self.levels))(*(level.record() for level in self.levels))
        made[0].levels = len(self.levels)
        return made


def describe(address: int, format_: int, channels: int, width: int, height: int) -> TextureRecord:
    """Return a record of elements at an address. Fails with CUDA_ERROR_INVALID_VALUE for an unknown format."""
    if format_ not in FORMATS or channels not in (1, 2, 4):
        raise DriverError(Result.INVALID_VALUE, f"array format {format_:#x} with {channels} channels")
    kind, size = FORMATS[format_]
    record = TextureRecord(
        data=address, width=width, height=height, depth=1, channels=channels, channel_bytes=size, kind=kind
    )
    record.row_bytes = record.slice_bytes = width * channels * size
    return record


@dataclass()
class _Object:
    """The record of a handle, and the descriptors that it was made from."""

    record: TextureRecord
    resource: bytes


@dataclass()
class TextureObject(_Object):
    """A CUtexObject. `view` is empty if it was made without a resource view."""

    texture: bytes
    view: bytes


class SurfaceObject(_Object):
    """A CUsurfObject."""
