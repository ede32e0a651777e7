# race corpus
# rule = "Launches of one executable graph come one behind the other; two executables of one graph run in no order"
# source = "Driver API, Graph Management, cuGraphLaunch"
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
one, two = (ok(driver.cuStreamCreate(1)) for _ in range(2))
ok(driver.cuStreamBeginCapture(one, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill(one, x)  # @node
graph = ok(driver.cuStreamEndCapture(one))
first = ok(driver.cuGraphInstantiate(graph, 0))
second = ok(driver.cuGraphInstantiate(graph, 0)) if sys.argv[1] == "racy" else first
for executable, stream in ((first, one), (second, two)):
    ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuCtxSynchronize())
