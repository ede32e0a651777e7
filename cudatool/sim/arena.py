"""Device memory: one reserved arena per machine, in which a device address is a host address.

Pages that belong to no allocation are inaccessible, so a stray kernel access faults as it does on a GPU.
Small requests share 2 MiB slabs at 512-byte granularity, larger ones get whole 2 MiB pages, as NVIDIA's driver does.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
from typing import Final

from cudatool.files import KeptDescriptor
from cudatool.sim.results import AddressSpaceError, DriverError, Result

__all__ = [
    "ALIGNMENT",
    "PAGE",
    "READ_ONLY",
    "READ_WRITE",
    "SLAB_LIMIT",
    "AddressSpace",
    "Arena",
    "DeviceMemory",
    "FreeList",
    "HostMemory",
    "SharedFile",
    "Store",
    "is_mapped",
    "renew",
    "unmap",
]

PAGE: Final = 2 << 20
"""Bytes per device page."""
READ_ONLY: Final = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ALIGNMENT: Final = 512
"""Of allocations, bytes."""
SLAB_LIMIT: Final = 1 << 20
"""Bytes from which on an allocation has pages of its own."""
_HOST_PAGE: Final = mmap.PAGESIZE
_PLACE: Final = 1 << 45  # where device memory begins if nothing else is there: addresses are the same in each process
# Bytes before device memory that fault, so that a negative index reaches nothing else; maps of memory have room for the
# host's there. At most as many as device memory has.
_GUARD: Final = 4 << 30
_PROT_NONE, _PROT_READ, _PROT_RW = 0, 1, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_UNUSED = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE  # with no access: addresses that cost nothing
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 14, 15
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _place(address: int, size: int, protection: int, flags: int, file: int = -1, offset: int = 0) -> None:
    """Replace what is at an address: by addresses that cost nothing, or by a part of a file."""
    if _libc.mmap(address, size, protection, flags | _MAP_FIXED, file, offset) != address:
        raise DriverError(Result.OUT_OF_MEMORY, "the host has no memory left for the software device")


def renew(address: int, size: int) -> None:
    """Put new pages of zeros, which no other process sees, in the place of what is at an address."""
    _place(address, size, _PROT_RW, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE)


class FreeList:
    """First fit by address over free intervals, merged when they touch."""

    def __init__(self) -> None:
        self._free: list[list[int]] = []  # [start, end), ordered

    def give(self, start: int, end: int) -> tuple[int, int]:
        """Return an interval to the list and return the merged free interval it is now part of."""
        index = bisect.bisect_left(self._free, [start, 0])
        if index and self._free[index - 1][1] == start:
            index -= 1
            self._free[index][1] = end
        else:
            self._free.insert(index, [start, end])
        if index + 1 < len(self._free) and self._free[index + 1][0] == end:
            self._free[index][1] = self._free.pop(index + 1)[1]
        return self._free[index][0], self._free[index][1]

    def take(self, size: int) -> int | None:
        for index, interval in enumerate(self._free):
            if interval[1] - interval[0] >= size:
                start = interval[0]
                interval[0] += size
                if interval[0] == interval[1]:
                    del self._free[index]
                return start
        return None

    def remove(self, start: int, end: int) -> None:
        """Take exactly [start, end), which must be free."""
        index = bisect.bisect_right(self._free, [start, 1 << 63]) - 1
        low, high = self._free.pop(index)
        if end < high:
            self._free.insert(index, [end, high])
        if low < start:
            self._free.insert(index, [low, start])


class Arena:
    """The address space that all devices of the machine share, reserved but not accessible.

    Attributes
    ----------
    base, size
        What may hold device memory. It grows with the ranges that programs reserve, up to `limit`.
    ranges
        The addresses for those.
    before
        Addresses directly before it, which no memory ever has.
    """

    def __init__(self, size: int, ranges_size: int) -> None:
        guard = min(_GUARD, size)
        whole = guard + size + ranges_size + PAGE
        reserved = _libc.mmap(_PLACE, whole, _PROT_NONE, _UNUSED, -1, 0)
        if reserved in (None, ctypes.c_void_p(-1).value):
            raise AddressSpaceError(whole)
        self.base: int = -(-(reserved + guard) // PAGE) * PAGE
        self.before = range(self.base - guard // PAGE * PAGE, self.base)
        self._fixed = size
        self.limit = size + ranges_size
        self.ranges = AddressSpace(self.base + size, ranges_size)

    @property
    def size(self) -> int:
        return self._fixed + self.ranges.used


class AddressSpace:
    """Addresses that programs reserve themselves, and map memory to."""

    def __init__(self, base: int, size: int) -> None:
        self._base = base
        self._free = FreeList()
        self._free.give(base, base + size)
        self.used = 0
        """Bytes from the beginning to the end of the highest range that there ever was."""

    def reserve(self, size: int, alignment: int) -> int:
        """Return the start of `size` addresses; `alignment` is a power of two of at least :data:`PAGE`."""
        room = self._free.take(size + alignment - PAGE)
        if room is None:
            raise DriverError(Result.OUT_OF_MEMORY, f"no free address range of {size} bytes is left")
        start = -(-room // alignment) * alignment
        if room < start:
            self._free.give(room, start)
        if start + size < room + size + alignment - PAGE:
            self._free.give(start + size, room + size + alignment - PAGE)
        self.used = max(self.used, start + size - self._base)
        return start

    def unreserve(self, address: int, size: int) -> None:
        """Give back what :meth:`reserve` gave, with nothing mapped in it."""
        self._free.give(address, address + size)

    def map(self, address: int, size: int, file: SharedFile, offset: int) -> None:
        """Put a part of a file at an address, inaccessible."""
        _place(address, size, _PROT_NONE, _MAP_SHARED, file.opened, offset)

    def unmap(self, address: int, size: int) -> None:
        """Leave addresses without memory."""
        _place(address, size, _PROT_NONE, _UNUSED)

    def protect(self, address: int, size: int, access: int) -> None:
        """Set what can be done with mapped memory, in CUmemAccess_flags."""
        _libc.mprotect(address, size, {0: _PROT_NONE, READ_ONLY: _PROT_READ, READ_WRITE: _PROT_RW}[access])


class SharedFile(KeptDescriptor):
    """A file in memory, as large as it ever will be: no process can cut it short below another one's mapping.

    Parameters
    ----------
    descriptor
        One that :meth:`Store.new_file` made, in this process or in another, which this takes over.

    Raises
    ------
    OSError
        It is another kind of file.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        try:
            whole = bool(fcntl.fcntl(self.opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # no file in memory
            whole = False
        if not whole:
            self.close()
            raise OSError(f"{descriptor} is not a file descriptor of shared memory")

    @property
    def opened(self) -> int:
        """The descriptor; CUDA_ERROR_OPERATING_SYSTEM if the program closed it, as the number may be another file's."""
        number = self.number
        if number is None:
            raise DriverError(Result.OPERATING_SYSTEM, "the program closed a file descriptor of the software device")
        return number

    @property
    def inode(self) -> int:
        """What tells the file from all other files in memory."""
        assert self.identity is not None  # it was open
        return self.identity[1]

    def copied(self) -> int:
        """Return a new descriptor of the file."""
        return os.dup(self.opened)

    def map_all(self, size: int) -> int:
        """Return the address of the file's first `size` bytes in this process. :func:`unmap` takes them away."""
        address = _libc.mmap(None, size, _PROT_RW, _MAP_SHARED, self.opened, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise DriverError(Result.OUT_OF_MEMORY, "the host has no memory left for the software device")
        return int(address)


def unmap(address: int, size: int) -> None:
    """Take memory out of this process that :meth:`SharedFile.map_all` put there."""
    _libc.munmap(address, size)


class Store:
    """A file in memory whose parts are given out, for memory that must be mapped at several addresses."""

    NAME: Final = "cudatool"  # in /proc/PID/fd
    _SIZE: Final = 1 << 46  # what was never written takes no memory

    def __init__(self) -> None:
        self._file: SharedFile | None = None
        self._free = FreeList()
        self._free.give(0, self._SIZE)

    @staticmethod
    def new_file(size: int) -> SharedFile:
        """Return a file of `size` zeros."""
        try:
            file = os.memfd_create(Store.NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return SharedFile(file)
        except OSError as error:
            raise DriverError(
                Result.OPERATING_SYSTEM, f"the file for shared memory cannot be created: {error.strerror}"
            ) from error

    def take(self, size: int) -> tuple[SharedFile, int]:
        """Return the file and where in it `size` bytes are free."""
        if self._file is None:
            self._file = self.new_file(self._SIZE)
        offset = self._free.take(size)
        assert offset is not None  # the devices have less memory
        return self._file, offset

    @staticmethod
    def clear(file: SharedFile, offset: int, size: int) -> None:
        """Make a part of a file zeros that take no memory, unless the program closed it."""
        number = file.number
        if number is not None:
            _libc.fallocate(number, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, size)

    def give_back(self, offset: int, size: int) -> None:
        """Take bytes back, and their memory."""
        assert self._file is not None
        self.clear(self._file, offset, size)
        self._free.give(offset, offset + size)


class DeviceMemory:
    """The memory of one device: `size` bytes, somewhere in the 3 * `size` of address space at `base`."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.used = 0
        """Bytes of pages in use, what cuMemGetInfo subtracts."""
        # Address space twice the size of the memory: page-level fragmentation does not exist on a GPU, whose pages
        # are mapped anywhere, and must not make an allocation fail here either.
        self._pages = FreeList()
        self._pages.give(base, base + 2 * size)
        self._small = FreeList()
        self._next_module = base + 2 * size
        self._files: dict[int, SharedFile] = {}  # first address of pages that are shared -> the file that they are in

    def allocate(self, size: int, gap: int = 0) -> int:
        """Return the address of `size` accessible bytes, aligned to 512 (2 MiB from 1 MiB on).

        at least `gap` unused bytes follow.
        """
        if size < SLAB_LIMIT:
            rounded = -(-(size + gap) // ALIGNMENT) * ALIGNMENT
            address = self._small.take(rounded)
            if address is None:
                slab = self._take_pages(PAGE)
                self._small.give(slab, slab + PAGE)
                address = self._small.take(rounded)
                assert address is not None
            return address
        rounded = -(-size // PAGE) * PAGE
        address = self._take_pages(rounded, PAGE if gap else 0)
        # Large pages of the host: an index that jumps through memory costs less, and so does the first touch of it.
        # Not for slabs, of which most programs touch a few small pages.
        _libc.madvise(address, rounded, _MADV_HUGEPAGE)
        return address

    def allocate_for_module(self, size: int) -> int:
        """Return the address of `size` accessible bytes that nothing else will ever get.

        A program does not allocate by loading a module, so that must not look like reuse of freed memory.
        """
        rounded = -(-size // PAGE) * PAGE
        if self.used + rounded > self.size or self._next_module + rounded > self.base + 3 * self.size:
            raise DriverError(Result.OUT_OF_MEMORY)
        address = self._next_module
        _libc.mprotect(address, rounded, _PROT_RW)
        self._next_module += rounded
        self.used += rounded
        return address

    def free_of_module(self, address: int, size: int) -> None:
        """Take back what :meth:`allocate_for_module` gave for `size`."""
        rounded = -(-size // PAGE) * PAGE
        _libc.madvise(address, rounded, _MADV_DONTNEED)
        _libc.mprotect(address, rounded, _PROT_NONE)
        self.used -= rounded

    def free(self, address: int, size: int, gap: int = 0) -> None:
        """Take back what :meth:`allocate` gave for `size` and `gap`."""
        if size >= SLAB_LIMIT:
            self._give_pages(address, -(-size // PAGE) * PAGE, PAGE if gap else 0)
            return
        low, high = self._small.give(address, address + -(-(size + gap) // ALIGNMENT) * ALIGNMENT)
        slab = address // PAGE * PAGE
        if low <= slab and slab + PAGE <= high:
            self._small.remove(slab, slab + PAGE)
            self._give_pages(slab, PAGE)

    def share(self, address: int, size: int) -> tuple[SharedFile, int]:
        """Move an allocation's pages to a file, if they are not in one, so that other processes can map them.

        Nothing may use them during the call. Returns the file, and where in it the allocation is.
        """
        start = address // PAGE * PAGE
        if start not in self._files:
            length = -(-size // PAGE) * PAGE
            file = Store.new_file(length)
            pages = memoryview((ctypes.c_char * length).from_address(start))
            while pages:
                pages = pages[os.pwrite(file.opened, pages, length - len(pages)) :]
            _place(start, length, _PROT_RW, _MAP_SHARED, file.opened)
            self._files[start] = file
        return self._files[start], address - start

    def take(self, size: int) -> None:
        """Count `size` bytes as used, which lie elsewhere."""
        if self.used + size > self.size:
            raise DriverError(Result.OUT_OF_MEMORY)
        self.used += size

    def give_back(self, size: int) -> None:
        """Undo :meth:`take`."""
        self.used -= size

    def _take_pages(self, size: int, gap: int = 0) -> int:
        address = self._pages.take(size + gap) if self.used + size <= self.size else None
        if address is None:
            raise DriverError(Result.OUT_OF_MEMORY)
        if _libc.mprotect(address, size, _PROT_RW):
            self._pages.give(address, address + size + gap)
            raise DriverError(Result.OUT_OF_MEMORY, "the host has no memory left for the software device")
        self.used += size
        return address

    def _give_pages(self, address: int, size: int, gap: int = 0) -> None:
        file = self._files.pop(address, None)
        _place(address, size, _PROT_NONE, _UNUSED)  # what comes next shall neither be in a file nor have large pages
        if file is not None:
            file.close()
        self._pages.give(address, address + size + gap)
        self.used -= size


class HostMemory:
    """Pinned host memory: ordinary pages that the driver knows."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def allocate(self, size: int) -> int:
        """Return the address of `size` page-aligned, zeroed bytes."""
        try:
            mapping = mmap.mmap(-1, -(-size // _HOST_PAGE) * _HOST_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(_MADV_NOHUGEPAGE)  # a page is there when it was touched: cudatool.sim.observe.host_pages
        except (OSError, OverflowError):
            raise DriverError(Result.OUT_OF_MEMORY, f"the host cannot pin {size} bytes") from None
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._maps[address] = mapping
        return address

    def free(self, address: int) -> None:
        """Give the pages at `address` back. As on a GPU, views of it dangle from then on."""
        del self._maps[address]


def is_mapped(address: int, size: int) -> bool:
    """Return whether all of a range of addresses is memory of this process."""
    start = address // _HOST_PAGE * _HOST_PAGE
    pages = -(-(address + size - start) // _HOST_PAGE)
    return bool(_libc.mincore(start, pages * _HOST_PAGE, ctypes.create_string_buffer(pages)) == 0)
