# race corpus
# rule = "A child graph is a node: it comes behind what it depends on, with all that is in it"
# source = "Driver API, Graph Management, cuGraphAddChildGraphNode"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-waw", "memset", "child"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, fill, ok

Device().set_current()
x, context = int(ok(driver.cuMemAlloc(BYTES))), ok(driver.cuCtxGetCurrent())
stream = ok(driver.cuStreamCreate(1))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill(stream, x)  # @child
child = ok(driver.cuStreamEndCapture(stream))
graph = ok(driver.cuGraphCreate(0))
parameters = driver.CUDA_MEMSET_NODE_PARAMS()
parameters.dst, parameters.elementSize, parameters.width, parameters.height = driver.CUdeviceptr(x), 4, 8, 1
cleared = ok(driver.cuGraphAddMemsetNode(graph, None, 0, parameters, context))  # @memset
behind = [cleared] if sys.argv[1] == "fixed" else []
ok(driver.cuGraphAddChildGraphNode(graph, behind or None, len(behind), child))  # @child
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))
ok(driver.cuCtxSynchronize())
