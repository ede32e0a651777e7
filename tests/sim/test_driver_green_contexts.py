"""Green contexts: how a device is split, what belongs to a green context, and the errors of each call."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cudatool.sim import abi
from cudatool.sim.green import Resource, SmGroup

SM, CONFIG, QUEUE = 1, 1000, 10000
BACKFILL, LOCALITY = 1, 2
IGNORE_COSCHEDULING, MAX_CLUSTERS = 1, 2


def call(name, *arguments):
    """Call an entry point; return the name of its error, empty for success."""
    entry = abi.ENTRIES[name]
    number = abi.invoke(entry, tuple(arguments), 1)
    from cudatool.sim import Result

    return Result(number).name if number else ""


@pytest.fixture
def device(driver):
    """The multiprocessors of device 0."""
    found = Resource()
    assert call("cuDeviceGetDevResource", 0, ctypes.addressof(found), SM) == ""
    return found


def split(whole, *groups, results=True):
    """Split into groups of (count, together, flags); return error, what each group is told, parts, remainder."""
    wanted = (SmGroup * len(groups))(*(SmGroup(count, together, 0, flags) for count, together, flags in groups))
    parts, rest = (Resource * len(groups))(), Resource()
    to = ctypes.addressof(parts) if results else 0
    error = call(
        "cuDevSmResourceSplit",
        to,
        len(groups),
        ctypes.addressof(whole),
        ctypes.addressof(rest),
        0,
        ctypes.addressof(wanted),
    )
    return error, [group.smCount for group in wanted], [part.sm.smCount for part in parts], rest.sm.smCount, parts


def by_count(whole, room, flags, minimum):
    parts, rest, number = (Resource * max(room, 1))(), Resource(), ctypes.c_uint(room)
    to = ctypes.addressof(parts) if room else 0
    error = call(
        "cuDevSmResourceSplitByCount",
        to,
        ctypes.addressof(number),
        ctypes.addressof(whole),
        ctypes.addressof(rest),
        flags,
        minimum,
    )
    return error, number.value, [part.sm.smCount for part in parts], rest.sm.smCount, parts


def green_context(*resources):
    """Return error and handle of a green context of these resources."""
    array, descriptor, handle = (Resource * len(resources))(*resources), ctypes.c_size_t(), ctypes.c_size_t()
    error = call(
        "cuDevResourceGenerateDesc", ctypes.addressof(descriptor), ctypes.addressof(array), len(resources)
    ) or call("cuGreenCtxCreate", ctypes.addressof(handle), descriptor.value, 0, 0)
    return error, handle.value


def context_of(green):
    handle = ctypes.c_size_t()
    assert call("cuCtxFromGreenCtx", ctypes.addressof(handle), green) == ""
    return handle.value


@pytest.fixture
def primary(driver, ok):
    """The primary context, held."""
    yield ok(driver.cuDevicePrimaryCtxRetain(0))
    ok(driver.cuDevicePrimaryCtxRelease(0))


@pytest.fixture
def green(device):
    """A green context with half of the multiprocessors."""
    parts = split(device, (64, 0, 0))[4]
    error, handle = green_context(parts[0])
    assert error == ""
    yield handle
    call("cuGreenCtxDestroy", handle)


# ---- Resources ----


def test_device_has_all_multiprocessors_and_queues(driver, device):
    assert (device.sm.smCount, device.sm.minSmPartitionSize, device.sm.smCoscheduledAlignment) == (132, 8, 8)
    config = Resource()
    assert call("cuDeviceGetDevResource", 0, ctypes.addressof(config), CONFIG) == ""
    assert (config.wqConfig.device, config.wqConfig.wqConcurrencyLimit) == (0, 8)
    assert call("cuDeviceGetDevResource", 0, ctypes.addressof(config), 7) == "INVALID_RESOURCE_TYPE"
    assert call("cuDeviceGetDevResource", 99, ctypes.addressof(config), SM) == "INVALID_DEVICE"
    assert call("cuDeviceGetDevResource", 0, 0, SM) == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("groups", "told", "rest"),
    [
        ([(16, 0, 0)], [16], 116),
        ([(0, 0, 0)], [128], 4),  # two multiprocessors of 18 have no group of 8
        ([(0, 2, 0)], [132], 0),
        ([(10, 2, 0)], [10], 122),
        ([(64, 8, 0), (64, 8, 0)], [64, 64], 4),
        ([(66, 0, BACKFILL), (66, 0, BACKFILL)], [66, 66], 0),
        ([(8, 4, 0), (0, 2, BACKFILL)], [8, 124], 0),
    ],
)
def test_split_in_groups(device, groups, told, rest):
    error, found, counts, remainder, _ = split(device, *groups)
    assert (error, found, counts, remainder) == ("", told, told, rest)


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ([(10, 0, 0)], "INVALID_RESOURCE_CONFIGURATION"),  # not in eights
        ([(66, 0, 0), (66, 0, 0)], "INVALID_RESOURCE_CONFIGURATION"),
        ([(128, 0, 0), (0, 0, 0)], "INVALID_RESOURCE_CONFIGURATION"),  # nothing left for the second
        ([(8, 0, LOCALITY)], "INVALID_RESOURCE_CONFIGURATION"),
        ([(9, 0, BACKFILL)], "INVALID_VALUE"),
        ([(134, 0, 0)], "INVALID_VALUE"),
        ([(8, 3, 0)], "INVALID_VALUE"),
        ([(8, 0, 4)], "INVALID_VALUE"),
    ],
)
def test_what_cannot_be_split(device, groups, error):
    assert split(device, *groups)[0] == error


def test_discovery_without_results_may_find_nothing(device):
    error, told, counts, _, _ = split(device, (128, 0, 0), (0, 0, 0), results=False)
    assert (error, told, counts) == ("", [128, 0], [0, 0])


def test_split_by_count_makes_equal_parts(device):
    error, number, counts, rest, parts = by_count(device, 20, 0, 10)
    assert (error, number, rest) == ("", 8, 4)
    assert counts == [16] * 8 + [0] * 12
    assert by_count(device, 0, 0, 10)[:2] == ("", 8)
    assert by_count(device, 3, 0, 10)[:4] == ("", 3, [16, 16, 16], 84)
    assert by_count(device, 0, IGNORE_COSCHEDULING, 10)[:2] == ("", 13)
    assert by_count(device, 0, MAX_CLUSTERS, 1)[:2] == ("", 8)
    assert by_count(device, 0, 0, 133)[0] == "INVALID_VALUE"
    assert by_count(device, 0, 4, 8)[0] == "INVALID_VALUE"
    assert by_count(device, 0, 0, 132)[0] == "INVALID_RESOURCE_CONFIGURATION"
    assert by_count(parts[0], 0, 0, 8)[0] == "INVALID_RESOURCE_CONFIGURATION"
    assert by_count(Resource(), 0, 0, 8)[0] == "INVALID_RESOURCE_TYPE"


# ---- Contexts ----


def test_parts_of_one_split_join_in_a_context(device):
    parts = split(device, (16, 0, 0), (32, 0, 0))[4]
    error, handle = green_context(*parts)
    assert error == ""
    found = Resource()
    assert call("cuGreenCtxGetDevResource", handle, ctypes.addressof(found), SM) == ""
    assert found.sm.smCount == 48
    again = split(found, (40, 0, 0))
    assert (again[0], again[3]) == ("", 8)
    assert call("cuGreenCtxDestroy", handle) == ""


def test_parts_of_two_splits_do_not_join(device):
    one, other = split(device, (16, 0, 0))[4][0], split(device, (16, 0, 0))[4][0]
    assert green_context(one, other)[0] == "INVALID_RESOURCE_CONFIGURATION"
    assert green_context(device, device)[0] == "INVALID_RESOURCE_CONFIGURATION"
    assert green_context(Resource())[0] == "INVALID_RESOURCE_TYPE"


def test_current_green_context_owns_nothing_but_streams(driver, ok, primary, green):
    before = ok(driver.cuCtxGetCurrent())
    ok(driver.cuCtxPushCurrent(driver.CUcontext(context_of(green))))
    assert int(ok(driver.cuCtxGetCurrent())) == context_of(green)
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAlloc(64))
    owner = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
    assert int(ok(driver.cuPointerGetAttribute(owner, address))) == int(primary)
    context, found = ok(driver.cuStreamGetCtx_v2(stream))
    assert (int(context), int(found)) == (int(primary), green)
    assert int(ok(driver.cuStreamGetCtx(stream))) == context_of(green)
    assert int(ok(driver.cuStreamGetGreenCtx(0))) == green
    assert driver.cuStreamGetCtx_v2(2)[0].name == "CUDA_ERROR_INVALID_HANDLE"  # CU_STREAM_PER_THREAD
    ok(driver.cuMemFree(address))
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuCtxPopCurrent())
    assert int(ok(driver.cuCtxGetCurrent())) == int(before)
    assert int(ok(driver.cuStreamGetGreenCtx(0))) == 0


def test_handles_of_green_contexts_are_no_contexts(driver, ok, green):
    assert driver.cuCtxSetCurrent(driver.CUcontext(green))[0].name == "CUDA_ERROR_INVALID_CONTEXT"
    assert call("cuCtxGetDevResource", green, ctypes.addressof(Resource()), SM) == "INVALID_CONTEXT"
    assert call("cuGreenCtxDestroy", context_of(green)) == "INVALID_CONTEXT"
    number = ctypes.c_uint64()
    assert call("cuGreenCtxGetId", 0, ctypes.addressof(number)) == "INVALID_CONTEXT"
    assert call("cuGreenCtxGetId", green, ctypes.addressof(number)) == ""


def test_streams_are_detached_when_their_context_ends(driver, ok, primary, device):
    _, handle = green_context(split(device, (8, 0, 0))[4][0])
    assert call("cuGreenCtxStreamCreate", ctypes.addressof(ctypes.c_size_t()), handle, 0, 0) == "INVALID_VALUE"
    stream = ok(driver.cuGreenCtxStreamCreate(driver.CUgreenCtx(handle), 1, 0))
    found = Resource()
    assert call("cuStreamGetDevResource", int(stream), ctypes.addressof(found), SM) == ""
    assert found.sm.smCount == 8
    assert call("cuStreamGetDevResource", int(stream), ctypes.addressof(found), CONFIG) == "INVALID_RESOURCE_TYPE"
    assert call("cuGreenCtxDestroy", handle) == ""
    assert driver.cuStreamSynchronize(stream)[0].name == "CUDA_ERROR_STREAM_DETACHED"
    ok(driver.cuStreamDestroy(stream))
    assert call("cuGreenCtxDestroy", handle) == "INVALID_CONTEXT"


def test_context_waits_for_the_event_of_another(driver, ok, primary, device, schedule):
    one, other = (green_context(part)[1] for part in split(device, (8, 0, 0), (8, 0, 0))[4])
    ok(driver.cuCtxPushCurrent(primary))
    first, second = (ok(driver.cuGreenCtxStreamCreate(driver.CUgreenCtx(g), 1, 0)) for g in (one, other))
    address, event = ok(driver.cuMemAlloc(8)), ok(driver.cuEventCreate(2))
    ok(driver.cuMemsetD8Async(address, 1, 8, first))
    ok(driver.cuGreenCtxRecordEvent(driver.CUgreenCtx(one), event))
    ok(driver.cuGreenCtxWaitEvent(driver.CUgreenCtx(other), event))
    later = ok(driver.cuGreenCtxStreamCreate(driver.CUgreenCtx(other), 1, 0))
    ok(driver.cuMemsetD8Async(address, 2, 4, second))
    ok(driver.cuMemsetD8Async(int(address) + 4, 3, 4, later))
    ok(driver.cuCtxSynchronize())
    found = np.zeros(8, np.uint8)
    ok(driver.cuMemcpyDtoH(found.ctypes.data, address, 8))
    assert [2, 2, 2, 2, 3, 3, 3, 3] == found.tolist()
    for stream in (first, second, later):
        ok(driver.cuStreamDestroy(stream))
    ok(driver.cuEventDestroy(event))
    ok(driver.cuMemFree(address))
    for handle in (one, other):
        assert call("cuGreenCtxDestroy", handle) == ""
    ok(driver.cuCtxPopCurrent())


def test_events_of_a_capturing_context_cannot_be_recorded(driver, ok, green):
    ok(driver.cuCtxPushCurrent(driver.CUcontext(context_of(green))))
    stream, event = ok(driver.cuStreamCreate(1)), ok(driver.cuEventCreate(2))
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(2)))
    assert call("cuGreenCtxRecordEvent", green, int(event)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert driver.cuStreamEndCapture(stream)[0].name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuEventDestroy(event))
    ok(driver.cuCtxPopCurrent())
