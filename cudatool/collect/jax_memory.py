"""Notes what JAX says of its memory on a GPU: how much of what it took from the driver is in use."""

from __future__ import annotations

import sys
from typing import Any

from cudatool.trace import hooks
from cudatool.trace.events import Kind
from cudatool.trace.libraries import Library

__all__ = ["JaxMemory"]


class JaxMemory:
    """Emits ``POOL_USE`` for each GPU of JAX's where something has changed.

    JAX is asked only once it uses its devices: to ask would make it start them.
    """

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, int, int]] = {}

    def sample(self) -> None:
        """Ask now. Not to be called from a callback of the driver: JAX may hold the lock of its allocator then."""
        for device, said in _memory_of_devices():
            if self._said.get(device) != said:
                self._said[device] = said
                in_use, peak, limit = said
                hooks.emit(Kind.POOL_USE, device=device, name=Library.JAX, size=in_use, aux0=peak, aux1=limit)


def _memory_of_devices() -> list[tuple[int, tuple[int, int, int]]]:
    """Return ordinals, and the bytes in use, at most in use, and of the limit."""
    jax, bridge = sys.modules.get("jax"), sys.modules.get("jax._src.xla_bridge")
    is_initialized = getattr(bridge, "backends_are_initialized", None)  # no public function says it
    if jax is None or is_initialized is None:
        return []
    try:
        found = []
        for device in jax.local_devices() if is_initialized() else ():
            stats: Any = device.memory_stats() if device.platform == "gpu" else None
            if stats:  # None: an allocator that does not count, such as that of XLA_PYTHON_CLIENT_ALLOCATOR=platform
                numbers = (stats[name] for name in ("bytes_in_use", "peak_bytes_in_use"))
                found.append((device.local_hardware_id, (*numbers, stats.get("bytes_limit", 0))))
    except (
        AttributeError,
        KeyError,
        RuntimeError,
    ):  # JAX's, of a backend that failed or is being cleared: nothing is known then
        return []
    return found
