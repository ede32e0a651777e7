# race corpus
# rule = "Work that another stream does while a stream captures is not in the graph, and runs in no order with its launch"
# source = "CUDA Programming Guide, CUDA Graphs, Creating a Graph Using Stream Capture"
# cuda = "graphs of cuda.bindings are not recorded on a GPU"
# [expect]
# racy = [["race-raw", "prepare", "node"]]
# fixed = []
# ---
import sys

from cuda.bindings import driver
from cuda.core import Device
from race_kernels import BYTES, copy, fill, ok

Device().set_current()
x, y = (int(ok(driver.cuMemAlloc(BYTES))) for _ in range(2))
stream, other = (ok(driver.cuStreamCreate(1)) for _ in range(2))
ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill(stream if sys.argv[1] == "fixed" else other, x)  # @prepare
copy(stream, y, x)  # @node
graph = ok(driver.cuStreamEndCapture(stream))
executable = ok(driver.cuGraphInstantiate(graph, 0))
ok(driver.cuGraphLaunch(executable, stream))  # @launch
ok(driver.cuCtxSynchronize())
