"""Exact access footprints: which bytes of the device's memory a launch read, wrote and updated atomically.

Instrumented code sets a byte of a shadow map per byte accessed, one map per kind of access so that host threads need
not agree, and marks the page. Maps are reserved, not allocated: they cost what was touched.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from cudatool.sim.results import AddressSpaceError

__all__ = ["ATOMIC", "MAP_NORESERVE", "PAGE", "READ", "WRITE", "Footprint"]

READ, WRITE, ATOMIC = 1, 2, 4
PAGE = 4096
MAP_NORESERVE = 0x4000  # on Linux; Python names it from 3.13 on
_GROUP = mmap.PAGESIZE  # marks of pages in one page of the system
_MANY = 512  # pages; more are given back rather than cleared
_EVERY_BYTE = np.uint64(0x0101010101010101)  # a word of a map whose bytes are all accessed

_libc = ctypes.CDLL(None)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_MLOCK_ONFAULT = 1


class Footprint:
    """What launches access within ``[base, base + size)``.

    Parameters
    ----------
    base, size
        The device's memory, bytes.
    """

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        count = -(-(size // PAGE + 2) // _GROUP) * _GROUP  # an access may begin at the last byte
        lengths = (count * PAGE, count * PAGE, count * PAGE, count)
        try:
            self._maps = [mmap.mmap(-1, length, flags=flags) for length in lengths]
        except OSError:
            raise AddressSpaceError(sum(lengths)) from None
        for shadow in self._maps[:-1]:
            shadow.madvise(mmap.MADV_HUGEPAGE)  # dense accesses are the common case
        self._resident = np.zeros(count // _GROUP, np.uint8)
        *self._views, self._pages = (np.frombuffer(one, np.uint8) for one in self._maps)
        self.addresses = tuple(ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self._maps)
        # What is swapped out counts as never written: keep it from that, where the limit on locked memory allows.
        _libc.mlock2(self.addresses[-1], count, _MLOCK_ONFAULT)

    def _touched(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the pages that were marked, and of those after them: an access may cross over."""
        # The map is long and nearly empty: only what the system has given memory for was ever written.
        _libc.mincore(self.addresses[-1], len(self._pages), self._resident.ctypes.data)
        groups = np.flatnonzero(self._resident & 1)
        marked = np.flatnonzero(self._pages.view(np.bool).reshape(-1, _GROUP)[groups])
        pages = groups[marked // _GROUP] * _GROUP + marked % _GROUP
        return np.union1d(pages, pages + 1)

    def take(self) -> list[tuple[int, int, int]]:
        """Return what :meth:`ranges` does, and forget it."""
        pages = self._touched()
        found = self._ranges(pages)
        self._clear(pages)
        return found

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return ``(address, size, flags)`` of each maximal run of bytes accessed in the same ways, by address."""
        return self._ranges(self._touched())

    def _ranges(self, pages: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        if not len(pages):
            return []
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
        pieces = [piece for run in runs for piece in self._run(int(run[0]), int(run[-1]) + 1)]
        starts = np.concatenate([piece[0] for piece in pieces])
        flags = np.concatenate([piece[1] for piece in pieces])
        order = np.argsort(starts)
        starts, flags = starts[order], flags[order]
        changed = np.concatenate(([True], flags[1:] != flags[:-1]))
        starts, flags = starts[changed], flags[changed]
        sizes = np.diff(np.append(starts, self.size))
        kept = flags != 0
        columns = (starts[kept] + self.base, sizes[kept], flags[kept])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _run(self, first: int, stop: int) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
        """Return where the flags may change in pages ``[first, stop)``, and the flags from there on.

        Most pages are accessed in one way as a whole, or not at all; the others are looked at byte by byte.
        """
        flags = np.zeros(stop - first, np.uint8)
        mixed = np.zeros(stop - first, bool)
        for view, flag in zip(self._views, (READ, WRITE, ATOMIC), strict=True):
            words = view[first * PAGE : stop * PAGE].view(np.uint64).reshape(-1, PAGE // 8)
            low, high = words.min(axis=1), words.max(axis=1)
            flags |= np.where(high != 0, flag, 0).astype(np.uint8)
            mixed |= (low != high) | ((low != 0) & (low != _EVERY_BYTE))
        whole = np.flatnonzero(~mixed)
        pieces: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = [
            ((whole + first) * PAGE, flags[whole]),
            (np.array([stop * PAGE]), np.zeros(1, np.uint8)),  # the pages after the run
        ]
        pages = np.flatnonzero(mixed) + first
        if len(pages):
            read, write, atomic = (view[: len(view) // PAGE * PAGE].reshape(-1, PAGE)[pages] for view in self._views)
            bytes_ = (read | write << 1 | atomic << 2).astype(np.uint8, copy=False)
            changed = np.ones(bytes_.shape, bool)  # each page is a piece of its own
            changed[:, 1:] = bytes_[:, 1:] != bytes_[:, :-1]
            page, offset = np.nonzero(changed)
            pieces.append((pages[page] * PAGE + offset, bytes_[page, offset]))
        return pieces

    def clear(self) -> None:
        """Forget everything."""
        self._clear(self._touched())

    def _clear(self, pages: npt.NDArray[np.int64]) -> None:
        if len(pages) > _MANY:
            for shadow in self._maps[:-1]:
                shadow.madvise(mmap.MADV_DONTNEED)  # zeros when they are read again
            self._pages[pages[0] : pages[-1] + 1] = 0
            return
        for page in pages.tolist():
            for view in self._views:
                view[page * PAGE : (page + 1) * PAGE] = 0
            self._pages[page : page + 1] = 0
