"""Memory that the host can write without a call: who wrote which of its bytes last, found by comparing."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudatool.sim.allocations import Allocation

__all__ = ["HostBytes", "WatchedMemory", "bytes_at", "view"]


class WatchedMemory:
    """What is known of a pinned, registered or managed allocation.

    `initial` is what it held before the device first touched it, `known` what it held last, and `replayed` says which
    of those bytes were written by something that a replay repeats: the device, or the host if it said so. Kernels
    use it `in_place` if their replay must find it at its own address.
    """

    def __init__(self, allocation: Allocation) -> None:
        self.address = allocation.address
        self.size = allocation.size
        self.kind = allocation.kind
        self.in_place = allocation.kind == "managed"
        self.initial = np.zeros(allocation.size, np.uint8)
        self.known = np.zeros(allocation.size, np.uint8)
        self.replayed = np.zeros(allocation.size, bool)
        self._touched = np.zeros(allocation.size, bool)

    def look(self, address: int, size: int) -> HostBytes:
        """Take note of what the host has written until now."""
        part = slice(address - self.address, address - self.address + size)
        now = bytes_at(address, size)
        fresh = ~self._touched[part]
        self.initial[part][fresh] = now[fresh]
        self._touched[part] = True
        self.replayed[part] &= self.known[part] == now
        self.known[part] = now
        replayed = self.replayed[part]
        return HostBytes(self, address, now.tobytes(), replayed.copy() if replayed.any() else None)

    def see_written(self) -> None:
        """The device has put there what is new."""
        now = bytes_at(self.address, self.size)
        new = self.known != now
        self.known[new] = now[new]
        self.replayed[new] = True

    def written(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        """`data` was put there by what a replay repeats."""
        part = slice(address - self.address, address - self.address + len(data))
        self.known[part] = data
        self.replayed[part] = True


@dataclass(frozen=True, slots=True)
class HostBytes:
    """What a part of the host's memory held when an operation began; `replayed` are the bytes not to put there."""

    memory: WatchedMemory
    address: int
    data: bytes
    replayed: npt.NDArray[np.bool_] | None = None


def bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the memory at an address, as an array that shares it."""
    return np.frombuffer(view(address, size), np.uint8)


def view(address: int, size: int) -> memoryview:
    """Return the memory at an address."""
    return memoryview((ctypes.c_uint8 * size).from_address(address))
