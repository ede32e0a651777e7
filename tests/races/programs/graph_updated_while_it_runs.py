# race corpus
# rule = "An update holds for later launches: one that runs goes on with the old parameters, and its memory is in use"
# source = "Driver API, Graph Management, cuGraphExecUpdate"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "node", "write"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
old, new = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream, other = (ok(driver.cuStreamCreate(1)) for _ in range(2))


def captured(address):
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    fill(stream, address)  # @node
    return ok(driver.cuStreamEndCapture(stream))


executable = ok(driver.cuGraphInstantiate(captured(old), 0))
ok(driver.cuGraphLaunch(executable, stream))
launched = ok(driver.cuEventCreate(2))
ok(driver.cuEventRecord(launched, stream))
ok(driver.cuGraphExecUpdate(executable, captured(new)))
if sys.argv[1] == "fixed":
    ok(driver.cuStreamWaitEvent(other, launched, 0))
fill(other, old)  # @write
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuCtxSynchronize())
