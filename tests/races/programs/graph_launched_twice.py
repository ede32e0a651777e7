# race corpus
# rule = "Launches of one executable graph come one behind the other, on whatever streams; those of two do not"
# source = "Driver API, Graph Management, cuGraphLaunch (behind any previous launches of hGraphExec)"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "node", "node"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
x = int(ok(driver.cuMemAlloc(BYTES)))
first, second = (ok(driver.cuStreamCreate(1)) for _ in range(2))
ok(driver.cuStreamBeginCapture(first, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill(first, x)  # @node
graph = ok(driver.cuStreamEndCapture(first))
one = ok(driver.cuGraphInstantiate(graph, 0))
two = one if sys.argv[1] == "fixed" else ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(one, first))  # @launch
ok(driver.cuGraphLaunch(two, second))  # @launch
ok(driver.cuCtxSynchronize())
