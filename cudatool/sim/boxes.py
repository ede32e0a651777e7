"""The C structures of copies in two and three dimensions (cuda.h), and where in memory the bytes of each side are."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64

from cudatool.sim import machine as state
from cudatool.sim.results import DriverError, Result
from cudatool.sim.textures import Array
from cudatool.sim.transfers import Box, CopyExtent

__all__ = [
    "ARRAY",
    "DEVICE",
    "HOST",
    "UNIFIED",
    "BatchOperation",
    "BoxSide",
    "Memcpy2D",
    "Memcpy3D",
    "box_of",
    "read_2d",
    "read_3d",
]

HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4  # CUmemorytype
_OF_MEMORY, _OF_ARRAY = 1, 2  # CUmemcpy3DOperandType


class BoxSide(ctypes.Structure):
    """One half of CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER."""

    _fields_ = (
        ("XInBytes", c_size_t),
        ("Y", c_size_t),
        ("Z", c_size_t),
        ("LOD", c_size_t),
        ("MemoryType", c_int),
        ("Host", c_size_t),
        ("Device", c_uint64),
        ("Array", c_size_t),
        ("context", c_size_t),  # of CUDA_MEMCPY3D_PEER
        ("Pitch", c_size_t),
        ("Height", c_size_t),
    )


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("src", BoxSide),
        ("dst", BoxSide),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
        ("Depth", c_size_t),
    )

    @property
    def extent(self) -> CopyExtent:
        """How much is copied."""
        return CopyExtent(self.WidthInBytes, self.Height, self.Depth)


class _Side2D(ctypes.Structure):
    _fields_ = (
        ("XInBytes", c_size_t),
        ("Y", c_size_t),
        ("MemoryType", c_int),
        ("Host", c_size_t),
        ("Device", c_uint64),
        ("Array", c_size_t),
        ("Pitch", c_size_t),
    )


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("src", _Side2D), ("dst", _Side2D), ("WidthInBytes", c_size_t), ("Height", c_size_t))

    def as_3d(self) -> Memcpy3D:
        """Return the same copy as one of a single slice."""
        what = Memcpy3D(WidthInBytes=self.WidthInBytes, Height=self.Height, Depth=1)
        for old, new in ((self.src, what.src), (self.dst, what.dst)):
            for name, _ in _Side2D._fields_:
                setattr(new, name, getattr(old, name))
        return what


class _PointerOperand(ctypes.Structure):
    _fields_ = (("ptr", c_uint64), ("rowLength", c_size_t), ("layerHeight", c_size_t), ("locHint", c_int * 2))


class _ArrayOperand(ctypes.Structure):
    _fields_ = (("array", c_size_t), ("offset", c_size_t * 3))


class _AnyOperand(ctypes.Union):
    _fields_ = (("ptr", _PointerOperand), ("array", _ArrayOperand))


class _Operand(ctypes.Structure):
    """CUmemcpy3DOperand."""

    _fields_ = (("type", c_int), ("op", _AnyOperand))

    @property
    def element_bytes(self) -> int | None:
        """Bytes of an element of its array; None for memory, which has none of its own."""
        if self.type == _OF_ARRAY:
            return state.machine.get(self.op.array.array, Array).element_bytes
        if self.type != _OF_MEMORY:
            raise DriverError(Result.INVALID_VALUE, f"{self.type} is not a type of operand")
        return None

    def as_side(self, extent: list[int], element: int) -> BoxSide:
        """Return it as a half of a CUDA_MEMCPY3D."""
        if self.type == _OF_ARRAY:
            x, y, z = self.op.array.offset
            return BoxSide(x * element, y, z, 0, ARRAY, Array=self.op.array.array)
        memory = self.op.ptr
        row, height = memory.rowLength or extent[0], memory.layerHeight or extent[1]
        if row < extent[0] or height < extent[1]:
            raise DriverError(
                Result.INVALID_VALUE, f"rows of {row} and layers of {height} are less than what is copied"
            )
        return BoxSide(MemoryType=UNIFIED, Device=memory.ptr, Pitch=row * element, Height=height)


class BatchOperation(ctypes.Structure):
    """CUDA_MEMCPY3D_BATCH_OP."""

    _fields_ = (
        ("src", _Operand),
        ("dst", _Operand),
        ("extent", c_size_t * 3),
        ("srcAccessOrder", c_int),
        ("flags", ctypes.c_uint),
    )

    def as_3d(self) -> Memcpy3D:
        """Return the copy; CUDA_ERROR_INVALID_VALUE for one of nothing, or between elements of different sizes."""
        sizes = {size for size in (self.src.element_bytes, self.dst.element_bytes) if size is not None} or {1}
        extent = list(self.extent)
        if len(sizes) > 1 or not all(extent):
            raise DriverError(Result.INVALID_VALUE, f"{extent} elements of {sorted(sizes)} bytes cannot be copied")
        element = sizes.pop()
        sides = (side.as_side(extent, element) for side in (self.src, self.dst))
        return Memcpy3D(*sides, extent[0] * element, extent[1], extent[2])


def read_2d(address: int) -> Memcpy3D:
    """Return the CUDA_MEMCPY2D at an address as a copy of a single slice; CUDA_ERROR_INVALID_VALUE for NULL."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    return Memcpy2D.from_address(address).as_3d()


def read_3d(address: int) -> Memcpy3D:
    """Return a copy of the CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER at an address; CUDA_ERROR_INVALID_VALUE for NULL."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    return Memcpy3D.from_buffer_copy(Memcpy3D.from_address(address))


def box_of(side: BoxSide, extent: CopyExtent) -> Box:
    """Return where the bytes of one side of a copy are.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE if rows or slices would overlap, or a copy leaves its array; CUDA_ERROR_INVALID_HANDLE
        for an array that is none.
    """
    if side.MemoryType == ARRAY:
        return _box_in(state.machine.get(side.Array, Array), side, extent)
    if side.MemoryType not in (HOST, DEVICE, UNIFIED):
        raise DriverError(Result.INVALID_VALUE, f"{side.MemoryType} is not a type of memory")
    width, height, depth = extent
    if (height > 1 or depth > 1) and side.Pitch < side.XInBytes + width:
        raise DriverError(
            Result.INVALID_VALUE, f"a pitch of {side.Pitch} is less than {width} bytes from {side.XInBytes} on"
        )
    if depth > 1 and side.Height < side.Y + height:
        raise DriverError(Result.INVALID_VALUE, f"slices of {side.Height} rows are less than {height} from {side.Y} on")
    base = side.Host if side.MemoryType == HOST else side.Device
    box = Box(base, side.Pitch, side.Pitch * side.Height)
    return Box(base and base + side.Z * box.slice + side.Y * box.pitch + side.XInBytes, box.pitch, box.slice)


def _box_in(array: Array, side: BoxSide, extent: CopyExtent) -> Box:
    room = array.row_bytes, max(array.height, 1), max(array.depth, 1)
    corner = side.XInBytes, side.Y, side.Z
    if any(start + size > limit for start, size, limit in zip(corner, extent, room, strict=True)):
        raise DriverError(Result.INVALID_VALUE, f"{tuple(extent)} from {corner} on is not inside an array of {room}")
    address = array.address + side.Z * array.slice_bytes + side.Y * array.row_bytes + side.XInBytes
    return Box(address, array.row_bytes, array.slice_bytes)
