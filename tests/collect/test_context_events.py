"""Events that stand for a whole context order what its streams did, for the sanitizer too."""

from __future__ import annotations

import pytest
from warm_process import run_python

from cudatool import sanitize
from cudatool.analyze import blocks
from cudatool.trace.events import ENDED_WITH_CONTEXT, Kind
from cudatool.trace.reader import read

_OK = """
import cudatool as ct

def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]

"""

_PROGRAM = (
    _OK
    + """
import sys
with ct.record("t.ctrace", device="sim"):
    from cuda.bindings import driver
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    whole = ok(driver.cuDeviceGetDevResource(0, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    parts, _, _ = ok(driver.cuDevSmResourceSplitByCount(2, whole, 0, 8))
    green = [ok(driver.cuGreenCtxCreate(ok(driver.cuDevResourceGenerateDesc([part], 1)), 0, 0)) for part in parts]
    streams = [ok(driver.cuGreenCtxStreamCreate(context, 1, 0)) for context in green]
    memory, event = ok(driver.cuMemAlloc(64)), ok(driver.cuEventCreate(2))
    ok(driver.cuMemsetD8Async(memory, 1, 64, streams[0]))
    if sys.argv[1] == "event":
        ok(driver.cuGreenCtxRecordEvent(green[0], event))
        ok(driver.cuGreenCtxWaitEvent(green[1], event))
    ok(driver.cuMemsetD8Async(memory, 2, 64, streams[1]))
    ok(driver.cuCtxSynchronize())
    ok(driver.cuMemFree(memory))
"""
)


@pytest.mark.parametrize(("how", "races"), [("event", 0), ("nothing", 1)])
def test_event_of_a_green_context_orders_its_streams(tmp_path, how, races):
    done = run_python(_PROGRAM, how, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert races == len(sanitize.check(read(tmp_path / "t.ctrace")).findings)


_DEVICES = (
    _OK
    + """
with ct.record("t.ctrace", device="sim:count=2"):
    from cuda.bindings import driver
    ok(driver.cuInit(0))
    contexts = [ok(driver.cuDevicePrimaryCtxRetain(device)) for device in range(2)]
    ok(driver.cuCtxSetCurrent(contexts[1]))
    first = ok(driver.cuMemAlloc(64))
    ok(driver.cuCtxSetCurrent(contexts[0]))
    ok(driver.cuMemFree(first))
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 1
    pool, stream = ok(driver.cuMemPoolCreate(properties)), ok(driver.cuStreamCreate(0))
    ok(driver.cuMemFreeAsync(ok(driver.cuMemAllocFromPoolAsync(64, pool, stream)), stream))
    ok(driver.cuStreamSynchronize(stream))
"""
)


def test_memory_is_that_of_its_device_whichever_context_is_current(tmp_path):
    done = run_python(_DEVICES, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "t.ctrace")
    assert [1] * 4 == trace.of_kind(Kind.MEM_ALLOC, Kind.MEM_FREE)["device"].tolist()
    assert (blocks(trace).end < len(trace.records)).all()


_ENDING = (
    _OK
    + """
with ct.record("t.ctrace", device="sim"):
    from cuda.bindings import driver
    ok(driver.cuInit(0))
    for _ in range(3):
        context = ok(driver.cuCtxCreate(None, 0, 0))
        freed, kept = ok(driver.cuMemAlloc(1 << 20)), ok(driver.cuMemAlloc(2 << 20))  # at the same addresses each time
        ok(driver.cuMemFree(freed))
        ok(driver.cuCtxDestroy(context))
    retained = ok(driver.cuDevicePrimaryCtxRetain(0))
    ok(driver.cuCtxSetCurrent(retained))
    ok(driver.cuMemAllocManaged(4 << 20, 1))
    ok(driver.cuDevicePrimaryCtxRelease(0))
"""
)


def test_memory_ends_with_its_context_and_was_leaked_all_the_same(tmp_path):
    done = run_python(_ENDING, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "t.ctrace")
    frees = trace.of_kind(Kind.MEM_FREE)
    assert [(1 << 20, 0), (2 << 20, ENDED_WITH_CONTEXT)] * 3 + [(4 << 20, ENDED_WITH_CONTEXT)] == list(
        zip(frees["size"].tolist(), frees["flags"].tolist(), strict=True)
    )
    assert [] == trace.notes
    report = sanitize.check(trace, "leak")
    assert {(6 << 20, 3), (4 << 20, 1)} == {(one.size, one.count) for one in report.on_device}
    held = blocks(trace)
    assert 7 == len(held) and (held.end < len(trace.records)).all()
