# race corpus
# rule = "After an update the next launch runs with the new parameters, and the old ones are used no more"
# source = "Driver API, Graph Management, cuGraphExecUpdate"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "node", "read"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
old, new, result = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(3))
stream, other = (ok(driver.cuStreamCreate(1)) for _ in range(2))


def captured(address):
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    fill(stream, address)  # @node
    return ok(driver.cuStreamEndCapture(stream))


executable = ok(driver.cuGraphInstantiate(captured(old), 0))
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuStreamSynchronize(stream))
ok(driver.cuGraphExecUpdate(executable, captured(new)))
ok(driver.cuGraphLaunch(executable, stream))  # @launch
copy(other, result, new if sys.argv[1] == "racy" else old)  # @read
ok(driver.cuCtxSynchronize())
