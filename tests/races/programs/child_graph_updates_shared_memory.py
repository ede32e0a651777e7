# race corpus
# rule = "Two child graphs that no edge orders run at the same time, with all that is in them"
# source = "Driver API, Graph Management, cuGraphAddChildGraphNode"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "child", "child"]]
# fixed = []
# apart = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
x, y, stream = int(ok(driver.cuMemAlloc(BYTES))), int(ok(driver.cuMemAlloc(BYTES))), ok(driver.cuStreamCreate(1))


def captured(address):
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    fill(stream, address)  # @child
    return ok(driver.cuStreamEndCapture(stream))


graph = ok(driver.cuGraphCreate(0))
first = ok(driver.cuGraphAddChildGraphNode(graph, None, 0, captured(x)))
behind = [first] if sys.argv[1] == "fixed" else []
child = captured(y if sys.argv[1] == "apart" else x)
ok(driver.cuGraphAddChildGraphNode(graph, behind or None, len(behind), child))
executable = ok(driver.cuGraphInstantiate(graph, 0))
for _ in range(2):
    ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuCtxSynchronize())
