"""CUlaunchConfig and its attributes, the C structures that describe a launch (cuda.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint

from cudatool.sim.results import DriverError, Result

__all__ = ["COOPERATIVE", "PROGRAMMATIC_STREAM_SERIALIZATION", "LaunchConfig", "cluster_of", "launch_attributes"]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("sharedMemBytes", c_uint),
        ("hStream", c_size_t),
        ("attrs", c_size_t),
        ("numAttrs", c_uint),
    )


_ATTRIBUTE_BYTES = 72  # sizeof(CUlaunchAttribute): id, padding to 8, a union of 64


COOPERATIVE, _CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
_EVENTS = {7: "programmaticEvent", 12: "launchCompletionEvent"}  # recorded by the launch itself, in the midst of it


def launch_attributes(launch: LaunchConfig) -> dict[int, bytes]:
    """Return each CUlaunchAttributeValue by its CUlaunchAttributeID; fail for what there is not on this device."""
    if cluster_of(launch) != (1, 1, 1):
        raise DriverError(Result.NOT_SUPPORTED, "the software device has no thread block clusters")
    given = _attributes(launch)
    for number, name in _EVENTS.items():
        if number in given:  # ignored, a wait for the event would order nothing
            raise DriverError(Result.NOT_SUPPORTED, f"the software device has no launch attribute {name}")
    return given


def cluster_of(launch: LaunchConfig) -> tuple[int, ...]:
    """Return the dimensions of the clusters that a launch asks for."""
    value = _attributes(launch).get(_CLUSTER_DIMENSION)
    return tuple((c_uint * 3).from_buffer_copy(value)) if value is not None else (1, 1, 1)


def _attributes(launch: LaunchConfig) -> dict[int, bytes]:
    first = launch.attrs
    attributes = range(first, first + launch.numAttrs * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
    return {c_int.from_address(at).value: ctypes.string_at(at + 8, _ATTRIBUTE_BYTES - 8) for at in attributes}
