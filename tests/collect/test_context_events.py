"""Events that stand for a whole context order what its streams did, for the sanitizer too."""

from __future__ import annotations

import pytest
from warm_process import run_python

from cudatool import sanitize
from cudatool.trace.reader import read

_PROGRAM = """
import sys
import cudatool as ct

def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]

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


@pytest.mark.parametrize(("how", "races"), [("event", 0), ("nothing", 1)])
def test_event_of_a_green_context_orders_its_streams(tmp_path, how, races):
    done = run_python(_PROGRAM, how, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert races == len(sanitize.check(read(tmp_path / "t.ctrace")).findings)
