"""Notes what JAX says of its memory on a GPU: how much of what it took from the driver is in use, and which call sites
hold its arrays when that is most.

JAX has no hook for its blocks, but it makes a profile of the arrays that live at the moment. That takes 0.3 ms, and
5 ms with 3,000 arrays: it is done when clearly more is in use than at the last one, for at most 1 % of the time. What
is in use between two samples, and what computations need for a moment, is in no profile. As the latter counts as in
use, arrays may later take its place unseen: while more is in use than a profile has shown, another one is made after
1 s, 2 s, 4 s and so on.
"""

from __future__ import annotations

import sys
from time import monotonic_ns
from typing import Any, Final

from cudatool.collect.jax_profile import Held, held
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Kind
from cudatool.trace.libraries import Library

__all__ = ["JaxMemory"]

_GROWTH: Final = 1.02  # from one profile to the next
_SHARE: Final = 100  # of the time, one in so many parts
_PAUSE_NS: Final = 1_000_000_000  # the first one; each later one is twice as long
# JAX's own errors, of a backend that failed or is being cleared, and what another version of JAX would raise.
_ERRORS: Final = (AttributeError, EOFError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError)


class JaxMemory:
    """Emits ``POOL_USE`` for each GPU of JAX's where something has changed, and ``POOL_HELD`` when most is in use.

    JAX is asked only once it uses its devices: to ask would make it start them.
    """

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, int, int]] = {}
        self._profiled: dict[int, int] = {}  # bytes in use at the last profile
        self._held: dict[int, int] = {}  # bytes of arrays in the profile that had most
        self._pause = _PAUSE_NS
        self._began, self._took = monotonic_ns(), 0
        self._due = self._began + self._pause

    def sample(self, *, last: bool = False) -> None:
        """Ask now; with `last`, also for a profile if a little more is in use than at the last one.

        Not to be called from a callback of the driver: JAX may hold the lock of its allocator then.
        """
        jax, found = sys.modules.get("jax"), _memory_of_devices()
        for device, (_, said) in found.items():
            if self._said.get(device) != said:
                self._said[device] = said
                in_use, peak, limit = said
                hooks.emit(Kind.POOL_USE, device=device, name=Library.JAX, size=in_use, aux0=peak, aux1=limit)
        began = monotonic_ns()
        in_time = self._took * _SHARE <= began - self._began
        growth = 1.0 if last else _GROWTH
        seen = self._profiled if last or began < self._due else self._held
        is_most = any(said[0] > growth * seen.get(device, 0) for device, (_, said) in found.items())
        if is_most and (in_time or last):
            self._profile(jax, {number: device for device, (number, _) in found.items()})
            self._took += monotonic_ns() - began
            if began >= self._due:
                self._pause *= 2
            self._due = began + self._pause
            self._profiled = {
                device: max(said[0], self._profiled.get(device, 0)) for device, (_, said) in found.items()
            }

    def _profile(self, jax: Any, ordinals: dict[int, int]) -> None:
        """Emit what each call site holds, of devices that hold more than in any profile so far.

        `ordinals` has those of devices by JAX's own number.
        """
        try:
            profile = held(jax.profiler.device_memory_profile())
        except _ERRORS:
            return
        sites: dict[int, list[Held]] = {}
        for one in profile:
            platform, _, number = one.device.rpartition(":")
            device = ordinals.get(int(number)) if platform not in ("", "cpu") and number.isdecimal() else None
            if one.kind == "buffer" and device is not None:
                sites.setdefault(device, []).append(one)
        moment = hooks.new_correlation()
        for device, found in sites.items():
            size = sum(one.size for one in found)
            if size <= self._held.get(device, 0):
                continue
            self._held[device] = size
            for one in found:
                where: dict[str, Any] = {"device": device, "stack": stacks.intern(one.frames), "correlation": moment}
                hooks.emit(Kind.POOL_HELD, **where, name=Library.JAX, size=one.size, aux0=one.count)


def _memory_of_devices() -> dict[int, tuple[int, tuple[int, int, int]]]:
    """Return by ordinal JAX's own number, and the bytes in use, at most in use, and of the limit."""
    jax, bridge = sys.modules.get("jax"), sys.modules.get("jax._src.xla_bridge")
    is_initialized = getattr(bridge, "backends_are_initialized", None)  # no public function says it
    if jax is None or is_initialized is None:
        return {}
    found = {}
    try:
        for device in jax.local_devices() if is_initialized() else ():
            stats: Any = device.memory_stats() if device.platform == "gpu" else None
            if stats:  # None: an allocator that does not count, such as that of XLA_PYTHON_CLIENT_ALLOCATOR=platform
                numbers = stats["bytes_in_use"], stats["peak_bytes_in_use"], stats.get("bytes_limit", 0)
                found[device.local_hardware_id] = device.id, numbers
    except (AttributeError, KeyError, RuntimeError):  # nothing is known then
        return {}
    return found
