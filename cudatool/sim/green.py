"""Green contexts: which multiprocessors and work queues a part of a program may use, and how a device is split.

The multiprocessors of a device stand in clusters; those of one cluster can run the blocks of a thread block cluster
together. That is all that splitting knows of them, so a set of multiprocessors is a number for each cluster.
Kernels run on the host's processors and are no slower with fewer multiprocessors.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_ubyte, c_uint
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from cudatool.loading.late_dataclasses import dataclass
from cudatool.sim import profile
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.machine import Context, Device
    from cudatool.sim.queue import Operation

__all__ = ["Descriptor", "GreenContext", "Resource", "ResourceType", "SmGroup", "split_by_count", "split_in_groups"]

_CLUSTERS: Final = (18, 16, 18, 16, 16, 16, 16, 16)
"""Multiprocessors of each cluster of a device."""
assert sum(_CLUSTERS) == profile.ATTRIBUTES[16]
_ALIGNMENT: Final = 8  # "8 on Compute Architecture 9.0+" (cuDevSmResourceSplit)
_LARGE_CLUSTER: Final = 16
_MOST_TOGETHER: Final = 32
_SMALLEST: Final = 2
_BACKFILL, _LOCALITY_DOMAIN = 1, 2  # CUdevSmResourceGroup_flags
_IGNORE_COSCHEDULING, _MAX_CLUSTERS = 1, 2  # CUdevSmResourceSplitByCount_flags
_CONNECTIONS: Final = 8  # default of CUDA_DEVICE_MAX_CONNECTIONS
_MAGIC: Final = 0x5EED0001


class ResourceType(IntEnum):
    """CUdevResourceType."""

    INVALID = 0
    SM = 1
    WORKQUEUE_CONFIG = 1000
    WORKQUEUE = 10000


class _Sm(ctypes.Structure):
    """CUdevSmResource."""

    _fields_ = (
        ("smCount", c_uint),
        ("minSmPartitionSize", c_uint),
        ("smCoscheduledAlignment", c_uint),
        ("flags", c_uint),
        ("localityDomainId", c_uint),
    )


class _WorkqueueConfig(ctypes.Structure):
    """CUdevWorkqueueConfigResource."""

    _fields_ = (("device", c_int), ("wqConcurrencyLimit", c_uint), ("sharingScope", c_int))


class _What(ctypes.Union):
    _fields_ = (("sm", _Sm), ("wqConfig", _WorkqueueConfig), ("reserved", c_ubyte * 40))


class Resource(ctypes.Structure):
    """CUdevResource. What comes between the type and the union is for the driver alone.

    `split` is the number of the split that it comes from, 0 if it was asked for; `taken` the multiprocessors of each
    cluster.
    """

    _anonymous_ = ("u",)
    _fields_ = (
        ("type", c_int),
        ("magic", c_uint),
        ("ordinal", c_int),
        ("split", c_uint),
        ("taken", c_ubyte * len(_CLUSTERS)),
        ("padding", c_ubyte * (80 - len(_CLUSTERS))),
        ("u", _What),
        ("nextResource", ctypes.c_size_t),
    )

    @classmethod
    def of_device(cls, device: Device, kind: int) -> Resource:
        """Return what a device has of a kind; CUDA_ERROR_INVALID_RESOURCE_TYPE for an unknown one."""
        if kind == ResourceType.SM:
            return cls.multiprocessors(device.ordinal, list(_CLUSTERS), _ALIGNMENT)
        if kind not in (ResourceType.WORKQUEUE_CONFIG, ResourceType.WORKQUEUE):
            raise DriverError(Result.INVALID_RESOURCE_TYPE)
        found = cls(type=kind, magic=_MAGIC, ordinal=device.ordinal)
        if kind == ResourceType.WORKQUEUE_CONFIG:
            found.wqConfig = _WorkqueueConfig(device.ordinal, _CONNECTIONS, 0)
        return found

    @classmethod
    def multiprocessors(
        cls, ordinal: int, taken: list[int], alignment: int, *, flags: int = 0, split: int = 0
    ) -> Resource:
        """Return the resource of these multiprocessors, of CU_DEV_RESOURCE_TYPE_INVALID if there are none."""
        if not sum(taken):
            return cls()
        found = cls(type=ResourceType.SM, magic=_MAGIC, ordinal=ordinal, split=split)
        found.taken[:] = taken
        found.sm = _Sm(sum(taken), min(_ALIGNMENT, alignment), alignment, flags, 0)
        return found

    def check(self, kind: ResourceType | None = None) -> None:
        """Fail with CUDA_ERROR_INVALID_RESOURCE_TYPE if it is not one that the driver made, of a kind."""
        if self.magic != _MAGIC or (kind is not None and self.type != kind):
            raise DriverError(
                Result.INVALID_RESOURCE_TYPE, "the descriptor is not one that the driver made, or is of another type"
            )


class SmGroup(ctypes.Structure):
    """CU_DEV_SM_RESOURCE_GROUP_PARAMS."""

    _fields_ = (
        ("smCount", c_uint),
        ("coscheduledSmCount", c_uint),
        ("preferredCoscheduledSmCount", c_uint),
        ("flags", c_uint),
        ("localityDomainId", c_uint),
        ("reserved", c_uint * 11),
    )


def _impossible(text: str) -> DriverError:
    return DriverError(Result.INVALID_RESOURCE_CONFIGURATION, text)


def _take(free: list[int], count: int, together: int, *, backfill: bool = False) -> list[int]:
    """Take up to `count` of the free multiprocessors, `together` at a time from a cluster; any, to fill up."""
    taken = [0] * len(free)
    for step in (together, 1) if backfill else (together,):
        for cluster in range(len(free)):
            number = min(free[cluster], count - sum(taken)) // step * step
            taken[cluster] += number
            free[cluster] -= number
    return taken


def split_in_groups(whole: Resource, groups: list[SmGroup], number: int) -> tuple[list[Resource], Resource]:
    """Carry out cuDevSmResourceSplit: return a resource for each group, and what is left.

    Groups that ask for 0 multiprocessors get what there is, and learn how many; a resource may then be invalid.

    Parameters
    ----------
    number
        Of this split.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE for parameters that no device could follow; CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
        for what this one cannot.
    """
    whole.check(ResourceType.SM)
    free, results = list(whole.taken), list[Resource]()
    for group in groups:
        together, count = group.coscheduledSmCount or _ALIGNMENT, group.smCount
        backfill = bool(group.flags & _BACKFILL)
        if group.flags & ~(_BACKFILL | _LOCALITY_DOMAIN) or together % _SMALLEST or together > _MOST_TOGETHER:
            raise DriverError(Result.INVALID_VALUE, f"groups of {together} with flags {group.flags:#x}")
        if count % _SMALLEST or count > whole.sm.smCount:
            raise DriverError(Result.INVALID_VALUE, f"{count} of {whole.sm.smCount} multiprocessors")
        if group.flags & _LOCALITY_DOMAIN:
            raise _impossible("the software device has no locality domains")
        taken = _take(free, count or whole.sm.smCount, together, backfill=backfill)
        if count and (sum(taken) < count or count < together):
            raise _impossible(f"there are not {count} free multiprocessors in groups of {together}")
        group.smCount = sum(taken) if sum(taken) >= together else 0
        results.append(Resource.multiprocessors(whole.ordinal, taken, together, flags=group.flags, split=number))
    return results, Resource.multiprocessors(whole.ordinal, free, _SMALLEST, split=number)


def split_by_count(
    whole: Resource, limit: int | None, flags: int, minimum: int, number: int
) -> tuple[list[Resource], Resource]:
    """Carry out cuDevSmResourceSplitByCount: return equal parts, at most `limit` of them, and what is left.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE for unknown flags or more than there is; CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION if
        there is not one such part, or `whole` comes from a split.
    """
    whole.check(ResourceType.SM)
    if flags & ~(_IGNORE_COSCHEDULING | _MAX_CLUSTERS) or minimum > whole.sm.smCount:
        raise DriverError(Result.INVALID_VALUE, f"{minimum} of {whole.sm.smCount} multiprocessors, flags {flags:#x}")
    if whole.split:
        raise _impossible("the result of a split cannot be split again without a green context")
    together = _SMALLEST if flags & _IGNORE_COSCHEDULING else _LARGE_CLUSTER if flags & _MAX_CLUSTERS else _ALIGNMENT
    size = -(-max(minimum, 1) // together) * together
    free, results = list(whole.taken), list[Resource]()
    while limit is None or len(results) < limit:
        left = list(free)
        taken = _take(left, size, together)
        if sum(taken) < size:
            break
        free = left
        results.append(Resource.multiprocessors(whole.ordinal, taken, together, split=number))
    if not results:
        raise _impossible(f"there are no {size} multiprocessors in groups of {together}")
    return results, Resource.multiprocessors(whole.ordinal, free, _SMALLEST, split=number)


@dataclass(frozen=True)
class Descriptor:
    """A CUdevResourceDesc: what a green context is to be made with, by type."""

    handle: int
    ordinal: int
    resources: dict[int, Resource]

    @classmethod
    def of(cls, resources: list[Resource], handle: int) -> Descriptor:
        """Return the descriptor of these resources.

        Raises
        ------
        DriverError
            CUDA_ERROR_INVALID_RESOURCE_TYPE for what is not a resource; CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION if
            they are of several devices, or multiprocessors of several splits or alignments.
        """
        for one in resources:
            one.check()
        if len({one.ordinal for one in resources}) > 1:
            raise _impossible("the resources belong to several devices")
        parts = [one for one in resources if one.type == ResourceType.SM]
        if len(parts) > 1 and (len({(p.split, p.sm.smCoscheduledAlignment) for p in parts}) > 1 or not parts[0].split):
            raise _impossible("the multiprocessors do not come from one split, or are aligned differently")
        known = {one.type: Resource.from_buffer_copy(one) for one in resources}
        if parts:
            taken = [sum(numbers) for numbers in zip(*(part.taken for part in parts), strict=True)]
            first = parts[0]
            known[ResourceType.SM] = Resource.multiprocessors(
                first.ordinal, taken, first.sm.smCoscheduledAlignment, flags=first.sm.flags
            )
        return cls(handle, resources[0].ordinal, known)


@dataclass(eq=False)
class GreenContext:
    """A green context, and the CUcontext that stands for it.

    Attributes
    ----------
    green_handle, handle
        The CUgreenCtx and the CUcontext.
    primary
        The context that everything made in it belongs to.
    """

    green_handle: int
    handle: int
    serial: int
    device: Device
    primary: Context
    resources: dict[int, Resource]
    is_destroyed: bool = False
    barrier: Operation | None = None
    """What all work in streams to come has to wait for (cuGreenCtxWaitEvent)."""

    def resource(self, kind: int) -> Resource:
        """Return what it has of a kind: all that its device has, if it was not limited."""
        return self.resources.get(kind) or Resource.of_device(self.device, kind)
